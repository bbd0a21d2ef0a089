"""`topw generate --prompts-jsonl`: one line per sequence, in order, despite interruptions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.invoking import Invoke
from tests.support.samples import slow
from tests.support.toy_model import CONTEXT, byte_ids
from topw_deploy.cli import batch
from topw_deploy.cli.terminal import click_bar
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.seeds import prompt_seed

PROMPTS = [
    "ab",
    {"prompt": "cde", "id": "second", "max_new_tokens": 3},
    {"prompt_ids": byte_ids("xyz"), "seed": 9},
    {"messages": [{"role": "user", "content": "hi"}], "id": 7, "temperature": 3},
    {"prompt": "ab", "num_return_sequences": 3},
    {"prompt": "q", "stop_strings": ["z"], "logit_bias": {"77": 2.5}, "preset": "lively"},
    "ab",
]
SETTINGS = ("--max-new-tokens", 6, "--temperature", 2)
TIMED = ("timings",)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", PROMPTS)


def written(path: Path, prompts: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, prompts)) + "\n", "utf-8")
    return path


def answers(text: str) -> list[dict[str, Any]]:
    return [{n: v for n, v in json.loads(line).items() if n not in TIMED} for line in text.splitlines()]


def same_tokens(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return [(a["index"], a["sample"], a["token_ids"]) for a in one] == [
        (a["index"], a["sample"], a["token_ids"]) for a in other
    ]


def test_every_prompt_has_its_lines_in_order(invoke: Invoke, random_model: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = invoke("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS, "--seed", 4)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    lines = answers(out.read_text("utf-8"))
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4, 4, 4, 5, 6]
    assert [line["sample"] for line in lines] == [0, 0, 0, 0, 0, 1, 2, 0, 0]
    assert [line["id"] for line in lines][:4] == [None, "second", None, 7]
    assert len(lines[1]["token_ids"]) == 3
    assert {line["run_seed"] for line in lines} == {4}
    assert invoke("generate", random_model, "--prompts-jsonl", "-", *SETTINGS, "--seed", 4, stdin=source.read_bytes())


def test_each_prompt_has_its_own_draws_which_its_seed_repeats(invoke: Invoke, random_model: Path, source: Path) -> None:
    lines = answers(invoke("generate", random_model, "--prompts-jsonl", source, *SETTINGS, "--seed", 4).stdout)
    assert [line["seed"] for line in lines if line["index"] != 2] == [
        prompt_seed(4, index) for index in (0, 1, 3, 4, 4, 4, 5, 6)
    ]
    assert lines[2]["seed"] == 9
    assert lines[0]["token_ids"] != lines[-1]["token_ids"]
    model = TopWModel.from_pretrained(random_model, provider="cpu")
    again = model.generate("ab", max_new_tokens=6, temperature=2, seed=lines[0]["seed"])
    assert again.token_ids == lines[0]["token_ids"]


@pytest.mark.parametrize("size", [2, 3, 50])
def test_tokens_do_not_depend_on_the_batch(invoke: Invoke, random_model: Path, source: Path, size: int) -> None:
    command = ("generate", random_model, "--prompts-jsonl", source, *SETTINGS, "--seed", 4)
    alone = answers(invoke(*command).stdout)
    assert same_tokens(answers(invoke(*command, "--batch-size", size).stdout), alone)


@pytest.mark.parametrize("seed", [slow(()), ("--seed", 4)])
def test_a_run_that_was_cut_anywhere_is_resumed_to_the_same_lines(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, seed: tuple[Any, ...]
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    assert invoke(*command, "--resume", *seed).exit_code == 0  # nothing to resume yet
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    cuts = [ends[0], ends[0] + 5, ends[4] + 7, ends[5], ends[-1] - 2, ends[-1]]
    for cut in cuts:  # in a line, between lines, between one prompt's sequences
        out.write_bytes(whole[:cut])
        result = invoke(*command, "--resume")
        assert answers(out.read_text("utf-8")) == answers(whole.decode()), cut
        kept = max((line["index"] + 1 for line in answers(whole.decode()) if finished(line, ends, cut)), default=0)
        assert f"{kept} of 7 prompts are already in" in result.stderr
        assert out.read_bytes().startswith(whole[: ends[0]])  # not regenerated, timings included
    out.write_bytes(whole[: ends[0] - 1])  # nothing finished, no seed recorded
    assert invoke(*command, "--resume", "--seed", answers(whole.decode())[0]["run_seed"]).stderr == ""
    assert answers(out.read_text("utf-8")) == answers(whole.decode())


def finished(line: dict[str, Any], ends: list[int], cut: int) -> bool:
    last = {0: 0, 1: 1, 2: 2, 3: 3, 4: 6, 5: 7, 6: 8}[line["index"]]  # the prompt's last line
    return ends[last] <= cut


def test_an_interruption_leaves_whole_lines_and_says_how_to_go_on(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    generate = TopWModel.generate

    def interrupted(model: TopWModel, prompt: Any, **given: Any) -> Any:
        if prompt == ["cde"]:
            raise KeyboardInterrupt
        return generate(model, prompt, **given)

    monkeypatch.setattr(TopWModel, "generate", interrupted)
    result = invoke(*command)
    assert result.exit_code != 0
    assert f"Finished answers are in {out}; run the same command with --resume to continue." in result.stderr
    assert [line["index"] for line in answers(out.read_text("utf-8"))] == [0]


def test_only_errors_of_a_prompt_are_answers_and_others_end_the_run(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS, "--seed", 4)
    generate = TopWModel.generate
    faults = {"ab": LogitsError("row 0 is invalid"), "cde": GenerationError("no memory")}

    def failing(model: TopWModel, prompt: Any, **given: Any) -> Any:
        if prompt[0] in faults:
            raise faults[prompt[0]]
        return generate(model, prompt, **given)

    with monkeypatch.context() as patch:
        patch.setattr(TopWModel, "generate", failing)
        with pytest.raises(GenerationError, match="no memory"):
            invoke(*command)
    assert [line.get("error_type") for line in answers(out.read_text("utf-8"))] == ["LogitsError"]
    with pytest.raises(PromptError, match="1 of 7 prompts failed"):
        invoke(*command, "--resume")
    assert [line["index"] for line in answers(out.read_text("utf-8"))] == [0, 1, 2, 3, 4, 4, 4, 5, 6]


def test_each_batch_is_in_the_file_before_the_next_is_run(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out.jsonl", []
    generate = TopWModel.generate

    def watched(model: TopWModel, prompt: Any, **given: Any) -> Any:
        seen.append(out.read_bytes().count(b"\n"))
        return generate(model, prompt, **given)

    monkeypatch.setattr(TopWModel, "generate", watched)
    invoke("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    assert seen == [0, 1, 2, 3, 4, 7, 8]


def test_lines_are_synced_to_the_disk_at_the_end_at_the_latest(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(batch.os, "fsync", lambda file: synced.append(file))
    monkeypatch.setattr(batch, "_SYNC_SECONDS", -1.0)
    invoke("generate", random_model, "--prompts-jsonl", source, "--output", tmp_path / "o.jsonl", *SETTINGS)
    assert len(synced) == 7 + 1  # every batch, then the end


def test_no_character_of_a_text_is_a_line_break_to_any_reader(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x2100))) + "😀"
    with batch.AnswerFile(tmp_path / "out.jsonl") as file:
        file.add([{"index": 0, "text": text}])
    (line,) = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["text"] == text
    assert "😀" in line


def test_existing_answers_are_replaced_only_on_request(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    with pytest.raises(ParameterError, match="exists; continue it with --resume, or replace it with --overwrite"):
        invoke(*command)
    for precious in ("precious\n", '"precious"\n', "precious", '{"index": 0}\n'):
        out.write_text(precious)
        with pytest.raises(ParameterError, match="was not written by this command; choose another --output"):
            invoke(*command, "--resume")
        assert out.read_text() == precious
    assert invoke(*command, "--overwrite").exit_code == 0
    assert len(out.read_text().splitlines()) == 9
    for output, message in (
        ("/dev/null", "is not a regular file"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "o", "none is not a folder"),
    ):
        with pytest.raises(ParameterError, match=message):
            invoke(*command[:4], "--output", output)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda prompts: ["other", *prompts[1:]], (), "line 1 of .* answers another prompt"),
        (lambda prompts: prompts[:3], (), "line 4 of .* answers a prompt that the input lacks, which has 3"),
        (lambda prompts: prompts, ("--lam", 1), "line 1 of .* with other parameters"),
        (lambda prompts: prompts, ("--seed", 5), "was made with seed 4, but seed is 5"),
        (lambda prompts: prompts, ("--max-context", 50), "line 1 of .* with other parameters"),
    ],
)
def test_a_run_is_not_resumed_after_answers_to_other_prompts_or_parameters(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path, change: Any, options: Any, message: str
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    invoke(*command, "--seed", 4)
    before = out.read_bytes()
    written(source, change(PROMPTS))
    with pytest.raises(ParameterError, match=message):
        invoke(*command, "--resume", *options)
    assert out.read_bytes() == before


def test_a_run_is_not_resumed_after_answers_of_another_model(
    invoke: Invoke, random_model: Path, scripted: Path, tmp_path: Path
) -> None:
    source, out = written(tmp_path / "in.jsonl", ["x"]), tmp_path / "out.jsonl"
    invoke("generate", scripted, "--prompts-jsonl", source, "--output", out)
    with pytest.raises(ParameterError, match="was made with another model"):
        invoke("generate", random_model, "--prompts-jsonl", source, "--output", out, "--resume")


def test_prompts_added_at_the_end_are_answered_by_a_resumed_run(
    invoke: Invoke, random_model: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    invoke(*command)
    written(source, [*PROMPTS, "more"])
    assert "7 of 8 prompts" in invoke(*command, "--resume").stderr
    assert [line["index"] for line in answers(out.read_text("utf-8"))][-2:] == [6, 7]


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_that_cannot_be_run_is_a_line_with_its_error_and_the_rest_is_done(
    invoke: Invoke, random_model: Path, tmp_path: Path, size: int
) -> None:
    source = written(tmp_path / "in.jsonl", ["ab", "x" * (CONTEXT + 1), {"prompt_ids": [999_999], "id": "b"}, "cd"])
    out = tmp_path / "out.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS, "--seed", 4)
    with pytest.raises(PromptError, match=r"2 of 4 prompts failed; their lines in .* hold the error"):
        invoke(*command, "--batch-size", size)
    lines = answers(out.read_text("utf-8"))
    assert [("error" in line, line["index"], line["id"]) for line in lines] == [
        (False, 0, None),
        (True, 1, None),
        (True, 2, "b"),
        (False, 3, None),
    ]
    assert f"has {CONTEXT + 1} tokens" in lines[1]["error"]
    assert (lines[2]["error_type"], "999999" in lines[2]["error"]) == ("PromptError", True)
    before = out.read_bytes()
    with pytest.raises(PromptError, match="2 of 4 prompts failed"):  # not retried
        invoke(*command, "--resume")
    assert out.read_bytes() == before


def test_nothing_is_run_or_written_if_a_line_is_wrong(
    invoke: Invoke, random_model: Path, scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    wrong = written(tmp_path / "wrong.jsonl", ["ab", {"prompt": "cd", "temprature": 1}])
    no_template = written(tmp_path / "chat.jsonl", ["ab", PROMPTS[3]])
    monkeypatch.setattr(TopWModel, "generate", lambda *_args, **_given: pytest.fail("a prompt was run"))
    with pytest.raises(PromptError, match=r"line 2 of .*unknown parameter 'temprature'"):
        invoke("generate", random_model, "--prompts-jsonl", wrong, "--output", out)
    with pytest.raises(TokenizerError, match=r"line 2 of .*has no chat template"):
        invoke("generate", scripted, "--prompts-jsonl", no_template, "--output", out)
    assert not out.exists()


def test_a_bar_counts_prompts_on_a_terminal_and_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stderr", shown)
        with click_bar("prompts", 5, done=2, show_pos=True) as advance:
            advance(2)
            advance(1)
        assert ("2/5" in shown.getvalue(), "5/5" in shown.getvalue()) == (terminal, terminal)
        assert terminal or not shown.getvalue()


def test_stats_count_the_run_on_stderr(invoke: Invoke, random_model: Path, source: Path) -> None:
    result = invoke("generate", random_model, "--prompts-jsonl", source, *SETTINGS, "--stats", "--seed", 4)
    assert "9 sequences, " in result.stderr
    assert "run seed 4" in result.stderr
    assert len(result.stdout.splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ab", "--output", "x"), "--output needs --prompts-jsonl"),
        (("ab", "--batch-size", "2"), "--batch-size needs --prompts-jsonl"),
        (("ab", "--prompts-jsonl", "IN"), "give only one of"),
        (("--prompts-jsonl", "IN", "--resume"), "need --output with a file"),
        (("--prompts-jsonl", "IN", "--output", "-", "--overwrite"), "need --output with a file"),
        (("--prompts-jsonl", "IN", "--output", "x", "--resume", "--overwrite"), "not both"),
        (("--prompts-jsonl", "IN", "--output", "IN", "--overwrite"), "is the same file as --prompts-jsonl"),
    ],
)
def test_options_that_exclude_each_other_are_a_usage_error(
    invoke: Invoke, random_model: Path, source: Path, arguments: tuple[str, ...], message: str
) -> None:
    result: Result = invoke("generate", random_model, *(str(source) if a == "IN" else a for a in arguments))
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.stderr
    assert len(source.read_text("utf-8").splitlines()) == len(PROMPTS)
