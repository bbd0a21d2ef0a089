"""Decoders on the CUDA provider with the emulated sampler: node placement, copies per step, one graph capture.

The outputs of decoders are not checked, because the provider's kernels do nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.samples import broad

from .conftest import Folder, Generate

pytestmark = pytest.mark.long

PROMPTS = [[1, 5, 6, 7, 9], [1, 8]]
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPTS, "max_new_tokens": 12, "seed": seed, "temperature": 1.5, "lam": 0.1, "ignore_eos": True}
    for seed in (3, 4, 3)
]
GRAPHS = {"provider_options": {"enable_cuda_graph": "1"}}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama_untied", {"target": "tensorrt", "max_length": 64}),
        broad("qwen3", {"target": "tensorrt", "max_length": 64}),
        ("gemma3", {"target": "tensorrt", "max_length": 64}),
        broad("llama_untied", {"target": "tensorrt", "max_length": 64, "dtype": "fp32"}),
        broad("llama_untied", {}),
        ("gemma3", {}),
        broad("phi3", {}),
        ("gpt2", {}),
        ("llama_tied", {"dtype": "int4", "compute_dtype": "fp16"}),
        broad("llama_untied", {"dtype": "int4", "compute_dtype": "fp16", "symmetric": False}),
        broad("llama_tied", {"dtype": "int8", "compute_dtype": "fp16"}),
        ("gpt2", {"target": "tensorrt", "max_length": 64}),
    ],
)
def test_a_decoder_stays_on_the_gpu_and_its_step_is_captured_once(
    generate: Generate, folder: Folder, family: str, settings: dict[str, Any]
) -> None:
    path = folder(family, **{"dtype": "fp16", **settings})
    plain, captured = generate(path, REQUESTS), generate(path, REQUESTS, **GRAPHS)
    for found in (plain, captured):
        assert (found["sampler"], found["why"]) == ("native", "")
        assert not any(computes for _, computes in found["cpu_nodes"])
    assert [run["captures"] for run in plain["runs"]] == [0, 0, 0]
    assert [run["captures"] for run in captured["runs"]] == [1, 0, 0]
    assert [run["replays"] for run in captured["runs"]] == [11, 11, 11]
    assert all(run["mistakes"] == 0 for run in captured["runs"])
    windows = family == "gemma3" and "target" not in settings  # the two prompts are read one by one
    for run in captured["runs"][1:]:
        assert run["to_host"] == 12  # results, one copy per step
        zeros = windows or "target" in settings  # windows, and masked slots that are multiplied
        assert run["to_device"] == 12 + 2 + zeros + 2 * 2 * windows  # one per step, twice the rest
    # Kernels do nothing here: logits are what their memory held before, with windows now and then ids of a prompt.
    first, second, third = (run["tokens"] for run in captured["runs"])
    if not windows:
        assert [first, second, third] == [run["tokens"] for run in plain["runs"]]
        assert first == third
    assert len(set(first[0])) > 3  # replays use the step's own number
    assert first != second


def test_a_mixture_in_float16_runs_but_its_blocks_sizes_prevent_a_capture(generate: Generate, folder: Folder) -> None:
    path = folder("qwen3_moe", dtype="fp16")
    plain = generate(path, REQUESTS)
    assert (plain["sampler"], [run["mistakes"] for run in plain["runs"]]) == ("native", [0, 0, 0])
    assert not any(computes for _, computes in plain["cpu_nodes"])
    assert "cannot use the graph capture feature" in generate(path, REQUESTS, **GRAPHS)["error"]


def test_edits_change_in_a_captured_step(generate: Generate, folder: Folder) -> None:
    path = folder("llama_untied", dtype="fp16", target="tensorrt", max_length=64)
    penalised = [{**REQUESTS[0], "repetition_penalty": 1.3, "no_repeat_ngram_size": 1}]
    plain, captured = generate(path, penalised), generate(path, penalised, **GRAPHS)
    (run,) = captured["runs"]
    assert run["tokens"] == plain["runs"][0]["tokens"]
    assert all(len(set(row)) == 12 for row in run["tokens"])  # no repeated token
    assert run["mistakes"] == 0


def test_attention_that_the_provider_lacks_in_float32_is_refused_by_name_unless_allowed(
    generate: Generate, folder: Folder
) -> None:
    error = generate(folder("llama_untied"))["error"]
    assert error.startswith("cuda leaves 2 nodes on the CPU: 2 GroupQueryAttention (")
    assert (
        "export with --dtype fp16, or, for int4 and int8, with --compute-dtype fp16; pass allow_fallback=True" in error
    )
    accepted = generate(folder("llama_untied"), allow_fallback=True)
    assert ["GroupQueryAttention", True] in accepted["cpu_nodes"]


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_quantised_weights_and_tables_are_read_on_the_gpu(generate: Generate, folder: Folder, dtype: str) -> None:
    found = generate(folder("llama_tied", dtype=dtype, kv="concat"))
    assert found["sampler"] == "native"
    assert not any(computes for _, computes in found["cpu_nodes"])


def test_without_the_library_the_function_runs_but_cannot_be_captured(generate: Generate, folder: Folder) -> None:
    path = folder("llama_untied", dtype="fp16", target="tensorrt", max_length=64)
    found = generate(path, native=False)
    assert (found["sampler"], found["why"]) == ("graph", "TOPW_NATIVE=0 disables it")
    refused = generate(path, native=False, **GRAPHS)["error"]
    assert "control flow" in refused
    assert "topw plugins build --cuda" in refused


def test_the_static_form_of_the_function_can_be_captured(generate: Generate, folder: Folder) -> None:
    path = folder("llama_untied", dtype="fp16", target="tensorrt", max_length=64, branches=False)
    found = generate(path, native=False, **GRAPHS)
    assert (found["sampler"], found.get("error")) == ("graph", None)
