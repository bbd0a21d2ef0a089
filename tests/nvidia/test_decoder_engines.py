"""Tiny decoders of every family, for --target tensorrt, become engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, GlmConfig, LlamaConfig

from tests.support.hybrid_models import hybrid_config
from tests.support.samples import sampled
from tests.support.tiny_models import COMMON, export, write_checkpoint

from .conftest import Ask, assert_built

pytestmark = pytest.mark.long

SLOTS, PROMPT = 64, 16
BATCHES = [[1, 16]]
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("llama_tied", {}),
    "llama-static": ("llama_untied", {"branches": False}),
    "llama-half": (LlamaConfig(**COMMON, head_dim=16), {"dtype": "fp16"}),
    "llama-narrow-half": (LlamaConfig(**COMMON, head_dim=8), {"dtype": "bf16"}),
    "llama-int4": ("llama_untied", {"dtype": "int4", "average_bits": 7.0}),  # some have 8 bits
    "llama-copied-cache": ("llama_tied", {"kv": "concat", "max_length": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-half": ("qwen3_moe", {"dtype": "fp16"}),
    "phi3": ("phi3", {}),
    "gemma": (GemmaConfig(**COMMON, head_dim=8), {}),
    "gemma-half": (GemmaConfig(**COMMON, head_dim=16), {"dtype": "fp16"}),
    "glm": (GlmConfig(**COMMON, head_dim=32), {}),  # rotates neighbours, half of each head
    "inkling2": (hybrid_config("inkling2"), {}),  # biases by distance, convolutions
    "qwen3-next": (hybrid_config("qwen3_next"), {}),  # recurrences
    "demo": ("tiny", {"max_length": 256}),
    "demo-default-length": ("tiny", {"max_length": None}),
}


LONG = ("llama-static", "llama-half", "llama-int4", "llama-copied-cache", "qwen3-moe", "gemma-half", "inkling2", "demo")
"""The others are broad."""
INLINED = ("llama-static", "llama-half", "demo")
"""Of these, those that are also built with the function's 2,000 nodes; each takes ten seconds."""


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decoders")
    names = list(MODELS if request.config.option.broad else LONG)
    for name in names:
        family, settings = MODELS[name]
        source = "tiny" if family == "tiny" else write_checkpoint(folder / "checkpoints" / name, family)
        export(source, folder / name, **{"target": "tensorrt", "max_length": SLOTS, **settings})
    return {name: folder / name for name in names}


@pytest.fixture(scope="session")
def inlined(nvidia: Ask, decoders: dict[str, Path], request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = MODELS if request.config.option.broad else INLINED
    return _built(nvidia, {name: decoders[name] for name in names}, with_plugin=False)


@pytest.fixture(scope="session")
def plugged(nvidia: Ask, decoders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return _built(nvidia, decoders, with_plugin=True)


def _built(nvidia: Ask, decoders: dict[str, Path], *, with_plugin: bool) -> dict[str, dict[str, Any]]:
    tasks = [{"model": str(path / "model.onnx"), "batches": BATCHES, "sequence": PROMPT} for path in decoders.values()]
    return dict(zip(decoders, nvidia(tasks, with_plugin=with_plugin), strict=True))


@pytest.mark.parametrize("name", sampled(MODELS, INLINED, ()))
def test_a_decoder_with_its_sampler_inlined_is_built(inlined: dict[str, dict[str, Any]], name: str) -> None:
    assert_built(inlined[name], plugins=0)


@pytest.mark.parametrize("name", sampled(MODELS, LONG, ()))
def test_a_decoder_with_its_sampler_as_a_plugin_is_built(plugged: dict[str, dict[str, Any]], name: str) -> None:
    assert_built(plugged[name], plugins=1)


def test_attention_and_the_cache_become_tensorrts_own_layers(plugged: dict[str, dict[str, Any]]) -> None:
    half = plugged["llama-half"]
    assert half["cache_updates"] == 2 * half["attention"] > 0  # a layer has keys and values


def test_the_check_passes_what_the_builder_takes(nvidia: Ask, decoders: dict[str, Path]) -> None:
    for name, answer in zip(decoders, nvidia([{"check": str(path)} for path in decoders.values()]), strict=True):
        assert answer["takes"], (name, answer)
        assert answer["refusals"] == []


REFUSED = {"for-onnxruntime": {}, "quantised": {"dtype": "int4"}, "any-length": {"target": "tensorrt", "max_length": 0}}


def test_the_check_names_the_nodes_that_the_parser_refuses(nvidia: Ask, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "llama", "llama_untied")
    for name, settings in REFUSED.items():
        export(checkpoint, tmp_path / name, **settings)
    answers = nvidia([{"check": str(tmp_path / name)} for name in REFUSED])
    first = [answer["refusals"][0].split()[0] for answer in answers]
    assert first == ["GroupQueryAttention", "GatherBlockQuantized", "TensorScatter"]
    assert not any(answer["takes"] for answer in answers)
    assert all("--target tensorrt --max-length N" in answer["next_step"] for answer in answers)
