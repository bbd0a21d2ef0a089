"""Every architecture of transformers' causal-LM map is known, can be built, and its export can be tried."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coverage import runner
from benchmarks.coverage.architectures import (
    DECODER_ONLY,
    NOT_DECODER_ONLY,
    all_types,
    decoder_only_types,
    unlisted_types,
)
from benchmarks.coverage.overrides import OVERRIDES
from benchmarks.coverage.page import page
from benchmarks.coverage.peers import Peer, read_peers
from benchmarks.coverage.runner import (
    EXPORTED,
    FAILED,
    FORMS,
    REFUSED,
    WRONG,
    Result,
    ResultFile,
    run_all,
    run_one,
)
from benchmarks.coverage.tiny_configs import SIZES, tiny_config
from benchmarks.coverage.tiny_models import LEAST_EFFECT, TEXT_PARTS, check_forward, tiny_model
from tests.support.samples import sampled
from topw_deploy.errors import UnsupportedModelError


def failure(model_type: str) -> str:
    """Why the general rule does not build `model_type`, or "builds"."""
    try:
        check_forward(tiny_model(model_type))
    except Exception as error:  # noqa: BLE001  # model code can raise anything
        return f"{model_type} (does not build: {type(error).__name__}: {str(error)[:200]})"
    return f"{model_type} (builds)"


def test_every_type_of_the_map_is_listed() -> None:
    new = [failure(name) for name in unlisted_types()]
    assert not new, (
        f"transformers {metadata.version('transformers')} has new causal-LM types: {', '.join(new)}. List each in "
        "benchmarks/coverage/architectures.py, and see CONTRIBUTING.md, 'Raise the pin of transformers'."
    )


def test_the_tables_name_types_of_the_map_once() -> None:
    known = all_types().keys()
    assert (DECODER_ONLY | NOT_DECODER_ONLY.keys() | OVERRIDES.keys() | TEXT_PARTS.keys()) <= known
    assert not DECODER_ONLY & NOT_DECODER_ONLY.keys()
    assert not OVERRIDES.keys() & NOT_DECODER_ONLY.keys()


def test_a_type_without_overrides_gets_a_layer_of_each_kind_and_tiny_parts() -> None:
    assert "gpt_oss" not in OVERRIDES
    config = tiny_config("gpt_oss")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.num_local_experts, config.num_experts_per_tok) == (4, 2)
    assert (config.vocab_size, config.sliding_window) == (SIZES["vocab_size"], SIZES["sliding_window"])
    parts = tiny_config("gemma3")
    assert parts.text_config.hidden_size == parts.vision_config.hidden_size == SIZES["hidden_size"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(DECODER_ONLY - TEXT_PARTS.keys()))
def test_each_tiny_model_answers_by_its_whole_context(model_type: str) -> None:
    model = tiny_model(model_type)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert check_forward(model) > LEAST_EFFECT


def test_finished_exports_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def pretend(model_type: str, form: str, seconds: float) -> Result:
        tried.append((model_type, form))
        return Result(model_type=model_type, form=form, outcome=REFUSED, reason="no")

    monkeypatch.setattr(runner, "run_one", pretend)
    wanted = [("llama", "default"), ("gpt2", "int4")]
    run_all(wanted[:1], ResultFile(tmp_path / "results.json"))
    run_all(wanted, ResultFile(tmp_path / "results.json"), jobs=2)
    assert tried == wanted
    assert [(each.model_type, each.reason) for each in ResultFile(tmp_path / "results.json")] == [
        ("gpt2", "no"),
        ("llama", "no"),
    ]
    run_all(wanted[:1], ResultFile(tmp_path / "results.json"), again=True)
    assert tried == [*wanted, wanted[0]]


def test_an_export_beyond_its_time_is_a_result() -> None:
    result = run_one("llama", "default", seconds=0.2)
    assert (result.outcome, result.reason) == (FAILED, "not finished after 0 s")


def test_an_export_beyond_its_memory_is_a_result() -> None:
    result = run_one("llama", "default", memory=30 << 20)
    assert result.outcome == FAILED
    assert result.reason.startswith("the process ended with ")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", sampled(FORMS, ("tensorrt",), ()))
def test_the_runner_exports_and_verifies(form: str) -> None:
    result = run_one("llama", form)
    assert (result.outcome, result.states) == (EXPORTED, {"full": 2}), result.reason
    assert result.difference is not None
    assert 0 < result.difference < 1e-4  # the exporter's own bound at logits below 1


@pytest.mark.slow
def test_patches_of_bytes_are_refused_with_their_reason() -> None:
    from topw_deploy.export.trace.trace import trace

    with pytest.raises(UnsupportedModelError, match="BltForCausalLM runs its middle layers once for each patch"):
        trace(tiny_model("blt"))


def test_the_page_counts_what_was_exported_and_names_what_was_not(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.json")
    good, bad, alone, mixed = decoder_only_types()[:4]

    def add(model_type: str, form: str, outcome: str, **more: Any) -> None:
        file.add(Result(model_type=model_type, form=form, outcome=outcome, **more))

    add(good, "default", EXPORTED, difference=1.04e-5, states={"full": 2})
    for form, difference, outcome in zip(FORMS, (1e-6, 3e-5, 2e-6), (EXPORTED, WRONG, EXPORTED), strict=True):
        add(bad, form, REFUSED, reason="its layers are | odd.")
        states = {"window": 1, "full": 1} if form == "default" else {"full": 2}
        add(alone, form, EXPORTED, difference=difference, states=states, context=48)
        add(mixed, form, outcome, difference=2e-6, states={"full": 2}, reason="it differs.")
    text = page(file, [Peer("other", "1.0", (good, mixed, "bert"))])
    lines = text.splitlines()
    count = len(decoder_only_types())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert f"This page is incomplete: {3 * count - 10} exports have no result" in text
    (summary,) = [line for line in lines if "`topw-export MODEL OUT`" in line]
    assert f"{count - 4} no result" in summary
    assert f"| 3             | {100 * 3 / count:.1f} %" in summary
    assert f"at most 1e-05, except for `{alone}` 3e-05.\n" in text
    assert f"256 tokens: `{alone}` 48.\n" in text
    assert f"- full (2): `{good}`, `{mixed}`" in lines
    assert f"- full, window (1): `{alone}`" in lines
    assert [f"`{bad}`", "all", "its layers are / odd."] in rows
    assert [f"`{mixed}`", "tensorrt", "it differs."] in rows
    (listed,) = [line for line in lines if line.startswith("| other 1.0, listed")]
    assert "| 2 " in listed, "bert is not decoder-only"
    assert " 1 types export here that are in none of the other lists." in text.replace("\n", " ")


def test_the_stored_lists_of_other_exporters_are_of_the_map() -> None:
    peers = read_peers()
    assert [(peer.name, peer.version) for peer in peers] == [
        ("onnxruntime-genai", "0.18.0"),
        ("mobius-onnx", "0.1.0"),
        ("optimum-onnx", "0.1.0"),
    ]
    for peer in peers:
        assert {"llama", "qwen3", "gemma3_text"} <= set(peer.types) <= all_types().keys()
