"""`topw generate --prompts-jsonl`: one line per sequence, in order, despite interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.invoking import Invoke
from tests.support.samples import slow
from tests.support.toy_model import CONTEXT, byte_ids
from topw_deploy.cli import batch
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.seeds import prompt_seed, sequence_seed

PROMPTS = [
    "ab",
    {"prompt": "cde", "id": "second", "max_new_tokens": 3},
    {"prompt_ids": byte_ids("xyz"), "seed": 9},
    {"messages": [{"role": "user", "content": "hi"}], "id": 7, "temperature": 3},
    {"prompt": "ab", "num_return_sequences": 3},
    {"prompt": "q", "stop_strings": ["z"], "logit_bias": {"77": 2.5}, "preset": "lively"},
    "ab",
]
INDEXES = [0, 1, 2, 3, 4, 4, 4, 5, 6]
SETTINGS = ("--max-new-tokens", 6, "--temperature", 2)
Answer = Callable[..., Result]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", PROMPTS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def answer(invoke: Invoke, random_model: Path, source: Path, out: Path) -> Answer:
    """Runs the command; takes further options."""
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, *SETTINGS)
    return lambda *words: invoke(*command, *words)


def written(path: Path, prompts: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, prompts)) + "\n", "utf-8")
    return path


def lines_of(text: Path | str | bytes) -> list[dict[str, Any]]:
    """The lines of a file, or of a text, without timings."""
    content = text.read_bytes() if isinstance(text, Path) else text
    return [{n: v for n, v in json.loads(line).items() if n != "timings"} for line in content.splitlines()]


def watch(monkeypatch: pytest.MonkeyPatch, see: Callable[[Any], object]) -> None:
    """Call `see` with the prompt before each generation."""
    generate = TopWModel.generate

    def watched(model: TopWModel, prompt: Any, **given: Any) -> Any:
        see(prompt)
        return generate(model, prompt, **given)

    monkeypatch.setattr(TopWModel, "generate", watched)


def test_every_prompt_has_its_lines_in_order_and_its_own_draws_which_its_seed_repeats(
    answer: Answer, random_model: Path, out: Path
) -> None:
    result = answer("--seed", 4)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    lines = lines_of(out)
    assert [line["index"] for line in lines] == INDEXES
    assert [line["id"] for line in lines][:4] == [None, "second", None, 7]
    assert len(lines[1]["token_ids"]) == 3
    assert {line["run_seed"] for line in lines} == {4}
    own = [9 if i == 2 else prompt_seed(4, i) for i in INDEXES]
    places = [INDEXES[:place].count(index) for place, index in enumerate(INDEXES)]
    assert [line["seed"] for line in lines] == [sequence_seed(*pair) for pair in zip(own, places, strict=True)]
    assert lines[0]["token_ids"] != lines[-1]["token_ids"]
    model = TopWModel.from_pretrained(random_model, provider="cpu")
    again = model.generate("ab", max_new_tokens=6, temperature=2, seed=lines[0]["seed"])
    assert again.token_ids == lines[0]["token_ids"]


@pytest.mark.parametrize("size", [2, 3, 50])
def test_tokens_do_not_depend_on_the_batch_nor_on_where_prompts_come_from(
    invoke: Invoke, random_model: Path, source: Path, size: int
) -> None:
    command = ("generate", random_model, *SETTINGS, "--seed", 4, "--prompts-jsonl")
    alone = lines_of(invoke(*command, "-", stdin=source.read_bytes()).stdout)
    together = lines_of(invoke(*command, source, "--batch-size", size).stdout)
    assert [line["token_ids"] for line in together] == [line["token_ids"] for line in alone]


@pytest.mark.parametrize("seed", [slow(()), ("--seed", 4)])
def test_a_run_that_was_cut_anywhere_is_resumed_to_the_same_lines(
    answer: Answer, out: Path, seed: tuple[Any, ...]
) -> None:
    assert answer("--resume", *seed).exit_code == 0  # nothing to resume yet
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    last_of_prompt = [0, 1, 2, 3, 6, 7, 8]  # lines
    cuts = [ends[0], ends[0] + 5, ends[4] + 7, ends[5], ends[-1] - 2, ends[-1]]
    for cut in cuts:  # in a line, between lines, between one prompt's sequences
        out.write_bytes(whole[:cut])
        result = answer("--resume")
        assert lines_of(out) == lines_of(whole), cut
        kept = sum(ends[last] <= cut for last in last_of_prompt)
        assert f"{kept} of 7 prompts are already in" in result.stderr
        assert out.read_bytes().startswith(whole[: ends[0]])  # not regenerated, timings included
    out.write_bytes(whole[: ends[0] - 1])  # nothing finished, no seed recorded
    assert answer("--resume", "--seed", lines_of(whole)[0]["run_seed"]).stderr == ""
    assert lines_of(out) == lines_of(whole)


def test_an_interruption_leaves_whole_lines_and_says_how_to_go_on(
    answer: Answer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(prompt: Any) -> None:
        if prompt == ["cde"]:
            raise KeyboardInterrupt

    watch(monkeypatch, interrupt)
    result = answer()
    assert result.exit_code != 0
    assert f"Finished answers are in {out}; run the same command with --resume to continue." in result.stderr
    assert [line["index"] for line in lines_of(out)] == [0]


def test_only_errors_of_a_prompt_are_answers_and_others_end_the_run(
    answer: Answer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"ab": LogitsError("row 0 is invalid"), "cde": GenerationError("no memory")}

    def fail(prompt: Any) -> None:
        if prompt[0] in faults:
            raise faults[prompt[0]]

    with monkeypatch.context() as patch:
        watch(patch, fail)
        with pytest.raises(GenerationError, match="no memory"):
            answer("--seed", 4)
    assert [line.get("error_type") for line in lines_of(out)] == ["LogitsError"]
    with pytest.raises(PromptError, match="1 of 7 prompts failed"):
        answer("--seed", 4, "--resume")
    assert [line["index"] for line in lines_of(out)] == INDEXES


def test_each_batch_is_in_the_file_before_the_next_is_run(
    answer: Answer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    watch(monkeypatch, lambda _: seen.append(out.read_bytes().count(b"\n")))
    answer()
    assert seen == [0, 1, 2, 3, 4, 7, 8]


def test_no_character_of_a_text_is_a_line_break_to_any_reader() -> None:
    text = "".join(map(chr, range(0x2100))) + "😀"
    (line,) = batch.line_bytes({"index": 0, "text": text}).decode().splitlines()
    assert json.loads(line)["text"] == text
    assert "😀" in line


def test_existing_answers_are_replaced_only_on_request(
    invoke: Invoke, answer: Answer, random_model: Path, source: Path, out: Path
) -> None:
    out.write_text("precious\n")
    with pytest.raises(ParameterError, match="exists; continue it with --resume, or replace it with --overwrite"):
        answer()
    for precious in ("precious\n", '"precious"\n', "precious", "[" * 10**6, '{"index": 0}\n'):
        out.write_text(precious)
        with pytest.raises(ParameterError, match="was not written by this command; choose another --output"):
            answer("--resume")
        assert out.read_text() == precious
    assert answer("--overwrite").exit_code == 0
    assert len(out.read_text().splitlines()) == 9
    for output, message in (("/dev/null", "is not a regular file"), (out.parent, "is a folder"),
                            (out.parent / "none" / "o", "none is not a folder")):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            invoke("generate", random_model, "--prompts-jsonl", source, "--output", output)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda prompts: ["other", *prompts[1:]], (), "line 1 of .* answers another prompt"),
        (lambda prompts: prompts[:3], (), "line 4 of .* answers another prompt"),
        (lambda prompts: prompts, ("--lam", 1), "line 1 of .* or other parameters"),
        (lambda prompts: prompts, ("--seed", 5), "was made with seed 4, but seed is 5"),
        (lambda prompts: prompts, ("--max-context", 50), "line 1 of .* or other parameters"),
    ],
)
def test_a_run_is_not_resumed_after_answers_to_other_prompts_or_parameters(
    answer: Answer, source: Path, out: Path, change: Any, options: Any, message: str
) -> None:
    answer("--seed", 4)
    before = out.read_bytes()
    written(source, change(PROMPTS))
    with pytest.raises(ParameterError, match=message):
        answer("--resume", *options)
    assert out.read_bytes() == before


def test_a_run_is_not_resumed_after_answers_of_another_model(
    invoke: Invoke, random_model: Path, scripted: Path, tmp_path: Path, out: Path
) -> None:
    files = ("--prompts-jsonl", written(tmp_path / "in.jsonl", ["x"]), "--output", out)
    invoke("generate", scripted, *files)
    with pytest.raises(ParameterError, match="was made with another model"):
        invoke("generate", random_model, *files, "--resume")


def test_prompts_added_at_the_end_are_answered_by_a_resumed_run(answer: Answer, source: Path, out: Path) -> None:
    answer()
    written(source, [*PROMPTS, "more"])
    assert "7 of 8 prompts" in answer("--resume").stderr
    assert [line["index"] for line in lines_of(out)] == [*INDEXES, 7]


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_that_cannot_be_run_is_a_line_with_its_error_and_the_rest_is_done(
    answer: Answer, source: Path, out: Path, size: int
) -> None:
    written(source, ["ab", "x" * (CONTEXT + 1), {"prompt_ids": [999_999], "id": "b"}, "cd"])
    with pytest.raises(PromptError, match=r"2 of 4 prompts failed; their lines in .* hold the error"):
        answer("--batch-size", size)
    lines = lines_of(out)
    found = [("error" in line, line["index"], line["id"]) for line in lines]
    assert found == [(False, 0, None), (True, 1, None), (True, 2, "b"), (False, 3, None)]
    assert f"has {CONTEXT + 1} tokens" in lines[1]["error"]
    assert (lines[2]["error_type"], "999999" in lines[2]["error"]) == ("PromptError", True)
    before = out.read_bytes()
    with pytest.raises(PromptError, match="2 of 4 prompts failed"):  # not retried
        answer("--resume")
    assert out.read_bytes() == before


def test_nothing_is_run_or_written_if_a_line_is_wrong(
    invoke: Invoke, random_model: Path, scripted: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = written(tmp_path / "wrong.jsonl", ["ab", {"prompt": "cd", "temprature": 1}])
    no_template = written(tmp_path / "chat.jsonl", ["ab", PROMPTS[3]])
    watch(monkeypatch, lambda _: pytest.fail("a prompt was run"))
    with pytest.raises(PromptError, match=r"line 2 of .*unknown parameter 'temprature'"):
        invoke("generate", random_model, "--prompts-jsonl", wrong, "--output", out)
    with pytest.raises(TokenizerError, match=r"line 2 of .*has no chat template"):
        invoke("generate", scripted, "--prompts-jsonl", no_template, "--output", out)
    assert not out.exists()


def test_stats_count_the_run_on_stderr(answer: Answer) -> None:
    errors = answer("--stats", "--seed", 4).stderr
    assert "9 sequences, " in errors
    assert "run seed 4" in errors


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
