"""Engines give onnxruntime's results."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_double import Gpu
from tests.support.hybrid_models import hybrid_config
from tests.support.tensorrt_double import TensorRT
from tests.support.tiny_models import write_checkpoint
from tests.support.toy_model import BOS, PAD, Toy, byte_ids, export
from tests.tensorrt.run.conftest import Open
from topw_deploy.errors import GenerationError, ParameterError, PromptError
from topw_deploy.export import export_model
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.tensorrt.build import build_engine

HOT: dict[str, Any] = {"temperature": 2.0, "lam": 0.3, "ignore_eos": True, "max_new_tokens": 20, "seed": 5}
PROMPTS = ["a", "some much longer prompt than the others are", "middle one", "b"]


def generate(model: TopWModel, prompts: Any, **settings: Any) -> list[GenerationResult]:
    results = model.generate(prompts, **{**HOT, **settings})
    return results if isinstance(results, list) else [results]


def assert_alike(found: list[GenerationResult], expected: list[GenerationResult]) -> None:
    """Compare all but timings, exactly: the double computes with onnxruntime."""
    for one, other in zip(found, expected, strict=True):
        left, right = one.as_dict(), other.as_dict()
        for name in ("timings", "sampler"):
            del left[name], right[name]
        assert left == right


@pytest.mark.parametrize("kind", ["both", "decode", "prefill"])
def test_a_sequence_has_the_tokens_that_the_cpu_draws(opened: Open, on_cpu: TopWModel, kind: str) -> None:
    model = opened(profile=kind)
    found = generate(model, "sixteen letters!", max_new_tokens=40)
    assert_alike(found, generate(on_cpu, "sixteen letters!", max_new_tokens=40))
    assert (model.provider, model.sampler, found[0].sampler) == ("tensorrt", "plugin", "plugin")
    assert not all(found[0].certified)  # geometry is used


COLUMNS: dict[str, list[Any]] = {
    "max_new_tokens": [30, 3, 17, 40],
    "seed": [1, 2, 3, 4],
    "temperature": [0.0, 2.0, 1.0, 3.0],
    "repetition_penalty": [1.0, 1.3, 1.0, 0.9],
}
REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    ("a long prompt that fills many columns", {}),
    ("x", {"min_new_tokens": 5, "ignore_eos": False}),
    (PROMPTS[:2], {"repetition_penalty": 1.5, "presence_penalty": 0.5, "max_new_tokens": 60}),
    (PROMPTS, COLUMNS),  # rows end one after the other
    (PROMPTS[:2], {"logit_bias": {7: 3.0, 100: -np.inf}, "suppress_tokens": [101, 102]}),
    ("ab", {"no_repeat_ngram_size": 2, "bad_words_ids": [[100], [55, 100]]}),
]


@pytest.mark.parametrize("chunk", [None, 1, 5, 16])
def test_requests_of_every_kind_give_the_tokens_of_the_cpu_whatever_came_before(
    opened: Open, on_cpu: TopWModel, chunk: int | None
) -> None:
    model = opened({"prefill_chunk": chunk})
    for prompts, settings in REQUESTS:
        assert_alike(generate(model, prompts, **settings), generate(on_cpu, prompts, **settings))


def test_a_prompt_goes_in_by_pieces_no_longer_than_the_engine_takes(
    opened: Open, on_cpu: TopWModel, trt: TensorRT
) -> None:
    prompt = "a prompt of more than forty letters, which is three pieces"
    assert_alike(generate(opened(), prompt), generate(on_cpu, prompt))
    decode, prefill = sorted(trt.contexts, key=lambda context: context.profile)
    assert (decode.runs, prefill.runs) == (19, -(-len(prompt) // 16))


def test_streamed_pieces_are_those_of_the_cpu_also_with_stop_strings(opened: Open, on_cpu: TopWModel) -> None:
    model = opened()
    text = generate(on_cpu, "abc")[0].text
    for settings in ({}, {"stop_strings": text[6:8]}):
        left, right = (list(m.stream("abc", **HOT, **settings)) for m in (model, on_cpu))
        assert [piece.text for piece in left] == [piece.text for piece in right]
        assert "".join(piece.text for piece in left) == left[-1].result.text  # type: ignore[union-attr]


def test_more_edits_than_the_engine_was_built_for_are_refused_and_harm_nothing(
    opened: Open, on_cpu: TopWModel, trt: TensorRT
) -> None:
    model = opened(max_edits=20)
    fits = {"suppress_tokens": list(range(10, 30))}
    assert_alike(generate(model, "abc", **fits), generate(on_cpu, "abc", **fits))
    before = len(trt.contexts)
    for settings in ({"suppress_tokens": list(range(10, 31))}, {**fits, "presence_penalty": 0.1}):
        with pytest.raises(ParameterError, match=r"edits more than 20 tokens .* build it with a higher --max-edits"):
            generate(model, "abc", **settings)
    assert_alike(generate(model, "abc"), generate(on_cpu, "abc"))
    assert len(trt.contexts) == before


def test_nan_in_a_cache_stays_with_its_request(opened: Open, on_cpu: TopWModel, gpu: Gpu) -> None:
    model = opened()
    before = generate(model, "ab")
    (cache,) = [memory for memory in gpu.device.values() if len(memory) == model.cache_bytes]
    cache.fill(0xFF)
    assert_alike(generate(model, "ab"), before)


def test_a_cache_whose_parts_do_not_end_at_256_bytes_is_taken(trt: TensorRT, tmp_path: Path) -> None:
    """100 tokens of 4 float32 numbers are 1,600 bytes; TensorRT requires addresses aligned to 256."""
    out = export(tmp_path / "out", Toy.random(1), form="scatter", max_length=100)
    build_engine(out, max_batch=4, max_sequence=16)
    model = TopWModel.from_pretrained(out, provider="tensorrt")
    on_cpu = TopWModel.from_pretrained(out, provider="cpu", intra_op_num_threads=1, sampler="graph")
    for prompts in ("abc", ["abc", "de", "f"]):
        assert_alike(generate(model, prompts), generate(on_cpu, prompts))


def test_prompts_may_fill_the_cache_but_not_exceed_it(opened: Open, on_cpu: TopWModel) -> None:
    model = opened()
    context = model.manifest.decoder.context_length  # type: ignore[union-attr]
    for tokens in (context - 1, context):
        prompt = (byte_ids("0123456789") * 20)[:tokens]
        assert_alike(generate(model, [prompt]), generate(on_cpu, [prompt]))
    with pytest.raises(PromptError, match=f"{context + 1} tokens"):
        generate(model, [[5] * (context + 1)])


def test_a_row_without_finite_logits_is_named(opened: Open, on_cpu: TopWModel) -> None:
    model, banned = opened(max_edits=300), {"suppress_tokens": list(range(259))}
    with pytest.raises(GenerationError, match="row 0 is invalid at step 0"):
        generate(model, [BOS, PAD, 9], **banned)
    assert_alike(generate(model, "abc"), generate(on_cpu, "abc"))


def test_threads_have_streams_of_their_own(opened: Open, on_cpu: TopWModel) -> None:
    model = opened()
    expected = {seed: generate(on_cpu, "abc", seed=seed) for seed in range(4)}
    found: dict[int, list[GenerationResult]] = {}

    def work(seed: int) -> None:
        found[seed] = generate(model, "abc", seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, one in expected.items():
        assert_alike(found[seed], one)


def test_more_rows_than_the_engine_was_built_for_are_refused(opened: Open) -> None:
    with pytest.raises(PromptError, match="5 sequences, but the model takes 4 at a time"):
        generate(opened(), ["a"] * 5)
    with pytest.raises(ParameterError, match="max_batch is 9, but the engine was built for 4"):
        opened({"max_batch": 9})


def test_inputs_that_the_engine_does_not_have_are_not_given_to_it(
    opened: Open, on_cpu: TopWModel, trt: TensorRT
) -> None:
    trt.pruned = {"beta": 2.5, "geom_scale": 0.5}
    found = generate(opened(), "abc", beta=1.0)
    assert_alike(found, generate(on_cpu, "abc", beta=2.5, geom_scale=0.5))


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("lfm2", marks=pytest.mark.long)])
def test_states_of_fixed_size_are_kept_between_steps_and_requests(family: str, trt: TensorRT, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", hybrid_config(family))
    export_model(source, tmp_path / "out", target="tensorrt", max_length=128, verify=False)
    build_engine(tmp_path / "out", max_batch=2)
    models = [
        TopWModel.from_pretrained(tmp_path / "out", provider=provider, sampler="graph" if provider == "cpu" else "auto")
        for provider in ("cpu", "tensorrt")
    ]
    prompts = [list(range(3, 90)), [5, 4, 3]]  # the first takes several runs
    for settings in ({"seed": 1}, {"seed": 2, "temperature": 0.0}):
        expected, found = (generate(model, prompts, **settings) for model in models)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
