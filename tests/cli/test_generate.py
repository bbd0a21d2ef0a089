"""`topw generate`: text on stdout, everything else on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import Invoke
from tests.support.toy_model import byte_ids
from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import preset_parameters
from topw_deploy.sampling.seeds import sequence_seed

from .conftest import ANSWER, Program


def test_stdout_carries_the_text_and_nothing_else(invoke: Invoke, scripted: Path) -> None:
    result = invoke("generate", scripted, "x")
    assert (result.exit_code, result.stdout, result.stderr) == (0, ANSWER + "\n", "")
    assert invoke("generate", scripted, "x", "--no-stream").stdout == ANSWER + "\n"


@pytest.mark.parametrize("data", [b"x\r\n", b"x", "\ufeffx\n".encode()], ids=["line break", "text", "mark"])
def test_prompts_come_from_a_file_or_standard_input(
    invoke: Invoke, scripted: Path, tmp_path: Path, data: bytes
) -> None:
    """The model answers one-token prompts. A final line break and a byte order mark are dropped."""
    (tmp_path / "prompt.txt").write_bytes(data)
    assert invoke("generate", scripted, "--file", tmp_path / "prompt.txt").stdout == ANSWER + "\n"
    assert invoke("generate", scripted, "-", stdin=data).stdout == ANSWER + "\n"
    assert invoke("generate", scripted, stdin=data).stdout == ANSWER + "\n"


def test_a_chat_reads_utf8_whatever_the_locale_and_no_byte_order_mark(invoke: Invoke, random_model: Path) -> None:
    words = ("chat", random_model, "--seed", 4, "--max-new-tokens", 3)
    plain = invoke(*words, stdin="é\n".encode())
    assert plain.exit_code == 0
    assert invoke(*words, stdin="\ufeffé\r\n".encode()).stdout == plain.stdout
    with pytest.raises(PromptError, match="standard input is not UTF-8"):
        invoke(*words, stdin=b"\xe9\n")


def test_a_prompt_in_utf16_or_without_a_file_is_refused_by_name(invoke: Invoke, scripted: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("x".encode("utf-16"))
    with pytest.raises(PromptError, match=r"prompt\.txt is not UTF-8 text .* UTF-16, save it as UTF-8"):
        invoke("generate", scripted, "--file", tmp_path / "prompt.txt")
    with pytest.raises(FileNotFoundError):
        invoke("generate", scripted, "--file", tmp_path / "none")


def test_one_json_object_per_sequence(invoke: Invoke, random_model: Path, opened: TopWModel) -> None:
    result = invoke(
        "generate", random_model, "ab", "--json", "--seed", 5, "--num-return-sequences", 2, "--max-new-tokens", 4
    )
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["seed"], second["seed"], first["prompt_tokens"]) == (5, sequence_seed(5, 1), 2)
    assert len(first["token_ids"]) == len(first["logprobs"]) == len(first["mass"]) == 4
    expected = opened.generate("ab", seed=5, num_return_sequences=2, max_new_tokens=4)
    assert [first["token_ids"], second["token_ids"]] == [r.token_ids for r in expected]


def test_the_short_names_of_other_tools_are_options_too(invoke: Invoke, random_model: Path) -> None:
    start = ("generate", random_model, "ab", "--seed", 5, "--ignore-eos")
    expected = invoke(*start, "--num-return-sequences", 2, "--max-new-tokens", 4, "--min-new-tokens", 2)
    assert expected.stdout
    assert invoke(*start, "--num-return-sequences", 2, "-n", 4, "--min-tokens", 2).stdout == expected.stdout
    settings = {"TOPW_GENERATE_MAX_NEW_TOKENS": "4", "TOPW_GENERATE_NUM_RETURN_SEQUENCES": "2"}
    assert invoke(*start, env=settings).stdout == expected.stdout


def test_the_model_and_the_prompt_may_be_options_and_run_is_another_name(
    invoke: Invoke, scripted: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("x")
    for words in (
        ("x", "-m", scripted),
        ("--model", scripted, "-p", "x"),
        (scripted, "--prompt", "x", "--device", "cpu"),
        (scripted, "-f", tmp_path / "prompt.txt"),
        ("--temp", 0, scripted, "x"),
        (scripted, "x", "--greedy"),
    ):
        for command in ("generate", "run"):
            assert invoke(command, *words).stdout == ANSWER + "\n"


def test_piped_text_comes_before_the_prompt(invoke: Invoke, random_model: Path, opened: TopWModel) -> None:
    words = ("generate", random_model, "what?", "--seed", 5, "--max-new-tokens", 4)
    expected = opened.generate("some\ntext\nwhat?", seed=5, max_new_tokens=4).text
    assert invoke(*words, stdin="some\ntext\n").stdout == expected + "\n"
    assert invoke(*words, "--echo", stdin="some\ntext\n").stdout == f"some\ntext\nwhat?{expected}\n"


def test_a_parameter_of_top_w_beside_another_rule_is_refused(program: Program, random_model: Path) -> None:
    for words in (("--top-p", 0.9, "--lam", 2), ("--preset", "lively", "--rule", "none", "--greedy")):
        done = program("generate", random_model, "x", *words)
        assert done.returncode == 2
        assert f"is a parameter of Top-W, but {words[0] if words[0] == '--top-p' else '--rule'} chooses" in done.stderr
    assert program("generate", random_model, "x", "--rule", "top-w", "--lam", 2, "-n", 2).returncode == 0


def test_several_sequences_are_printed_one_after_the_other(invoke: Invoke, random_model: Path) -> None:
    settings = ("generate", random_model, "ab", "--seed", 5, "--num-return-sequences", 3, "--max-new-tokens", 6)
    streamed = invoke(*settings)
    assert streamed.stdout == invoke(*settings, "--no-stream").stdout
    assert streamed.stderr.splitlines() == [f"--- text {number} of 3" for number in (1, 2, 3)]


def test_stats_go_to_stderr(invoke: Invoke, random_model: Path) -> None:
    result = invoke("generate", random_model, "ab", "--stats", "--seed", 5, "--max-new-tokens", 6)
    for part in ("2 + 6 tokens", "tokens/s", "certified", "kept median", "mass mean", "seed 5", "length"):
        assert part in result.stderr
        assert part not in result.stdout


def test_the_session_can_be_opened_for_so_many_tokens_and_fed_in_pieces(invoke: Invoke, random_model: Path) -> None:
    settings = ("generate", random_model, "abcdef", "--seed", 5, "--temperature", 2.0, "--max-new-tokens", 9)
    whole = invoke(*settings).stdout
    assert invoke(*settings, "--prefill-chunk", 2).stdout == whole
    ended = invoke(*settings, "--max-context", 10, "--json", "--ignore-eos")
    assert len(json.loads(ended.stdout)["token_ids"]) == 4
    with pytest.raises(PromptError, match="has 6 tokens, but the model was opened with max_length 5"):
        invoke(*settings, "--max-context", 5)


def test_every_parameter_reaches_the_model_in_both_spellings(
    invoke: Invoke, random_model: Path, opened: TopWModel
) -> None:
    given: dict[str, Any] = {
        "seed": 3, "max_new_tokens": 12, "temperature": 2.5, "beta": "2+0.4*T", "selection_temperature": 3.0,
        "geom_scale": -0.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "no_repeat_ngram_size": 2, "min_new_tokens": 5,
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    words += ["--lambda_geom", 2, "--warm-p", 0.9, "--logit-bias", "77=2.5", "--stop", "never", "--ignore-eos"]
    found = json.loads(invoke("generate", random_model, "ab", "--json", *words).stdout)
    others: dict[str, Any] = {"lam": 2, "init_top_p": 0.9, "logit_bias": {77: 2.5}, "stop_strings": ["never"]}
    expected = opened.generate("ab", **given, **others, ignore_eos=True)
    assert (found["token_ids"], found["kept"]) == (expected.token_ids, expected.kept)


def test_stop_texts_end_the_output(invoke: Invoke, scripted: Path) -> None:
    assert invoke("generate", scripted, "x", "--stop", "zzz", "--stop", "😀").stdout == "hello \n"


def test_options_have_environment_twins_and_the_flag_wins(invoke: Invoke, random_model: Path) -> None:
    words = ("generate", random_model, "ab", "--json", "--max-new-tokens", 3)
    env = {"TOPW_GENERATE_SEED": "41"}
    assert json.loads(invoke(*words, env=env).stdout)["seed"] == 41
    assert json.loads(invoke(*words, "--seed", 2, env=env).stdout)["seed"] == 2


def test_zero_is_a_value(invoke: Invoke, random_model: Path) -> None:
    words = ("generate", random_model, "ab", "--json", "--max-new-tokens", 8)
    greedy = json.loads(invoke(*words, "--temperature", 0, "--seed", 0).stdout)
    assert greedy["seed"] == 0
    assert set(greedy["kept"]) == {1}


def test_a_preset_states_the_parameters_that_are_not_given(
    invoke: Invoke, random_model: Path, opened: TopWModel
) -> None:
    words = ("generate", random_model, "ab", "--json", "--seed", 5, "--max-new-tokens", 8)
    found = json.loads(invoke(*words, "--preset", "lively", "--temperature", 2).stdout)
    parameters = preset_parameters("lively", *opened.manifest.sampler.geometry) | {"temperature": 2.0}
    assert found["token_ids"] == opened.generate("ab", seed=5, max_new_tokens=8, **parameters).token_ids
    assert found["kept"] != json.loads(invoke(*words, "--temperature", 2).stdout)["kept"]
    assert "'paper', 'released', 'creative', 'lively'" in invoke(*words, "--preset", "livley").stderr


@pytest.mark.parametrize(
    "words",
    [
        ("x", "--file", "y"),
        ("x", "y"),
        ("x", "--prompt", "y"),
        ("x", "--greedy", "--temp", "1"),
        ("x", "--system", "s"),
        ("x", "--logit-bias", "77"),
        ("x", "--threads", "-1"),
        ("x", "--max-new-tokens", "many"),
        ("x", "--nonsense"),
    ],
)
def test_wrong_usage_exits_with_2(invoke: Invoke, scripted: Path, words: tuple[str, ...]) -> None:
    result = invoke("generate", scripted, *words)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_chat_answers_one_prompt(invoke: Invoke, random_model: Path, opened: TopWModel) -> None:
    words = ("--seed", 4, "--max-new-tokens", 5)
    found = invoke("generate", random_model, "hi", "--chat", "--system", "be", *words).stdout
    assert found == opened.generate(byte_ids("sbeuhi>"), seed=4, max_new_tokens=5).text + "\n"


def test_a_conversation_remembers_and_can_be_cleared(invoke: Invoke, random_model: Path, opened: TopWModel) -> None:
    words = ("--seed", 4, "--max-new-tokens", 3, "--system", "S")
    lines = invoke("chat", random_model, *words, stdin="one\n\ntwo\n/clear\none\n").stdout
    first = opened.generate("sSuone>", seed=4, max_new_tokens=3).text
    second = opened.generate(f"sSuonea{first}utwo>", seed=4, max_new_tokens=3).text
    assert lines == f"{first}\n{second}\n{first}\n"


def test_the_commands_of_a_conversation_change_it(invoke: Invoke, random_model: Path, opened: TopWModel) -> None:
    def answer(prompt: str, **parameters: Any) -> str:
        return opened.generate(prompt, **{"seed": 4, "max_new_tokens": 3, **parameters}).text

    first = answer("uone>")
    typed = ("one", "/again", "/system S", "one", "/set seed 5", "/set max-tokens 2", "/clear", "one", "/set seed",
             "/set x 1", "/exit", "two")  # fmt: skip
    result = invoke("chat", random_model, "--seed", 4, "--max-new-tokens", 3, stdin="\n".join(typed))
    expected = [first, first, answer("sSuone>"), answer("sSuone>", seed=5, max_new_tokens=2)]
    assert result.stdout == "".join(f"{text}\n" for text in expected)
    assert "unknown parameter 'x'" in result.stderr
    assert "/again" in invoke("chat", random_model, stdin="/help\n").stderr


def test_a_command_that_fails_leaves_the_conversation(invoke: Invoke, random_model: Path) -> None:
    typed = ("/again", "/etc/x", "one", "/set top_k 5", "/set top_p 1", "/again", "/set top_p", "/set top_k", "/again")
    result = invoke("chat", random_model, "--seed", 4, "--max-new-tokens", 3, stdin="\n".join(typed))
    first, second = result.stdout.splitlines()
    assert first == second
    assert "There is no answer to repeat." in result.stderr
    assert "/etc/x is no command" in result.stderr


def test_a_conversation_that_outgrows_the_context_goes_on(invoke: Invoke, random_model: Path) -> None:
    result = invoke("chat", random_model, "--max-new-tokens", 2, stdin="a" * 200 + "\nb\n")
    assert result.exit_code == 0
    assert "context holds 96; shorten it. (/clear starts a new chat)" in result.stderr
    assert result.stdout


def test_a_model_without_a_template_cannot_chat(invoke: Invoke, scripted: Path) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        invoke("chat", scripted, stdin="hello\n")


def test_a_rule_is_chosen_by_its_parameter_or_by_name(invoke: Invoke, random_model: Path) -> None:
    words = ("generate", random_model, "ab", "--json", "--seed", 5, "--max-new-tokens", 4, "--temperature", 3)
    first = json.loads(invoke(*words, "--top-k", 2).stdout)
    assert first["rule"] == "top_k"
    assert max(first["kept"]) <= 2
    assert json.loads(invoke(*words, "--rule", "top_k", "--top-k", 2).stdout)["token_ids"] == first["token_ids"]
    assert json.loads(invoke(*words, "--rule", "top-k", "--top-k", 2).stdout)["rule"] == "top_k"
    assert invoke(*words, "--rule", "best").exit_code == 2


def test_a_rule_without_its_value_names_the_option(program: Program, random_model: Path) -> None:
    done = program("generate", random_model, "x", "--rule", "top_p")
    assert "the rule 'top_p' has no default; give --top-p, in (0, 1]." in done.stderr
    done = program("generate", random_model, "x", "--rule", "top_p", "--top-k", 3)
    assert "--top-k is for --rule top_k, but another rule was chosen, 'top_p'; give one of the two." in done.stderr
