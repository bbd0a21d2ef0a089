"""Unread tensors give the model that transformers loads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, LlamaConfig

from tests.support.hybrid_models import make_hybrid
from tests.support.samples import sampled
from tests.support.tiny_models import COMMON, FAMILIES, make_model
from topw_deploy.export.graph import LazyWeight, byte_blocks, transpose_tensor
from topw_deploy.export.source.checkpoint import (
    UnreadTensor,
    load_during_calls,
    load_reference,
    load_unread,
)
from topw_deploy.export.source.files import stored_tensors
from topw_deploy.export.trace.trace import fake_parameters, trace, weight_tensor
from topw_deploy.progress import StageMemory, resident_bytes


def load_checkpoint(folder: Path, dtype: str, *, unread: bool = False) -> Any:
    return load_unread(folder, dtype)[0] if unread else load_reference(folder, dtype)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that share a tensor."""
    named = parameters(model)
    return [[other for other in named if named[other] is named[name]] for name in named]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", sampled(FAMILIES, ("llama_untied", "gemma3")))
def test_every_parameter_and_buffer_equals_the_loaded_one(
    checkpoint: Callable[[str], Path], family: str, dtype: str
) -> None:
    read, unread = (load_checkpoint(checkpoint(family), dtype, unread=flag) for flag in (False, True))
    wanted, found = parameters(read), parameters(unread)
    assert wanted.keys() == found.keys()
    for name, parameter in found.items():
        assert isinstance(parameter, UnreadTensor)
        assert parameter.dtype == wanted[name].dtype
        assert torch.equal(parameter.values(), wanted[name].detach()), name
    assert tied_names(read) == tied_names(unread)
    buffers = dict(unread.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in read.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_mixers_that_use_their_childrens_weights_run_on_unread_ones(tmp_path: Path, family: str) -> None:
    make_hybrid(family).save_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    read, unread = (load_checkpoint(tmp_path, "float32", unread=flag) for flag in (False, True))
    with torch.no_grad(), load_during_calls(unread):
        found = unread(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        wanted = read(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, wanted, atol=1e-5)  # sums over memory of other alignment
    assert all(isinstance(parameter, UnreadTensor) for parameter in unread.parameters())


@pytest.mark.long
def test_buffers_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    """Routers add such a buffer to their scores in place."""
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = make_model(Glm4MoeConfig(**COMMON, **experts, head_dim=16, first_k_dense_replace=1))
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)
    unread = load_checkpoint(tmp_path, "float32", unread=True)
    buffers = dict(unread.named_buffers())
    assert torch.equal(buffers["model.layers.1.mlp.gate.e_score_correction_bias"], torch.arange(4.0))
    assert not any(isinstance(buffer, UnreadTensor) for buffer in buffers.values())
    assert trace(unread).num_layers == 2


def test_a_checkpoint_of_the_base_model_gets_its_prefix(tmp_path: Path) -> None:
    model = make_model("gpt2")
    model.config.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.transformer.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    unread = load_checkpoint(tmp_path, "float32", unread=True)
    assert torch.equal(parameters(unread)["transformer.wte.weight"].values(), tensors["wte.weight"])  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    ["llama_untied", pytest.param("gpt2", marks=pytest.mark.long), pytest.param("qwen3_moe", marks=pytest.mark.long)],
)
def test_unread_and_read_models_have_the_same_trace(checkpoint: Callable[[str], Path], family: str) -> None:
    graphs = [
        ir.to_proto(trace(load_checkpoint(checkpoint(family), "float16", unread=flag)).model) for flag in (False, True)
    ]
    assert graphs[0].SerializeToString() == graphs[1].SerializeToString()


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_a_streamed_model_computes_the_same_as_a_loaded_one(checkpoint: Callable[[str], Path], family: str) -> None:
    ids = torch.arange(12)[None]
    read, unread = (load_checkpoint(checkpoint(family), "float32", unread=flag) for flag in (False, True))
    with torch.no_grad():
        wanted = read(input_ids=ids).logits
        with load_during_calls(unread):
            assert torch.equal(unread(input_ids=ids).logits, wanted)
    assert all(isinstance(parameter, UnreadTensor) for parameter in unread.parameters())


def store_unread(tmp_path: Path, tensor: torch.Tensor) -> UnreadTensor:
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    return UnreadTensor.of(stored_tensors(tmp_path)["w"])


def test_operations_are_recorded_and_values_recomputed(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    unread = store_unread(tmp_path, tensor)
    first, second = torch.chunk(torch.stack([unread, unread.half().float()]).transpose(1, 2), 2, dim=2)
    assert isinstance(second, UnreadTensor)
    assert first.shape == (2, 4, 3)
    assert torch.equal(second.values()[0], tensor.T[:, 3:])
    assert second.values().data_ptr() != second.values().data_ptr()
    assert torch.equal(unread, unread.clone())  # reads the values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_in_parts_equals_the_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5)
    model = torch.nn.Linear(5, 7, bias=False)
    model.weight = torch.nn.Parameter(store_unread(tmp_path, tensor).to(dtype), requires_grad=False)
    value = ir.Value(name="weight", shape=ir.Shape([7, 5]))
    with fake_parameters(model) as weights:
        value.const_value = ir.tensor_adapters.TorchTensor(model.weight, name="weight")
        graph = ir.Graph([], [], nodes=[ir.node("Identity", [value])], initializers=[value])
        with weights.attached(graph):
            assert value.is_graph_input()
    assert not value.is_graph_input()
    weight = value.const_value
    assert isinstance(weight, LazyWeight)
    for lazy, wanted in (
        (weight, tensor.to(dtype)),
        (transpose_tensor(weight, (1, 0)), tensor.to(dtype).T.contiguous()),
    ):
        blocks = [bytes(block) for block in byte_blocks(lazy, 25)]
        assert len(blocks) > 2
        assert b"".join(blocks) == lazy.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    ids = np.array([6, 0, 6])
    assert weight.read is not None
    assert np.array_equal(weight.read(ids).astype(np.float32), tensor.to(dtype)[ids].float().numpy())


@pytest.mark.slow
def test_unread_weights_take_no_memory_and_written_ones_a_part_at_a_time(tmp_path: Path) -> None:
    """A float16 table of 48 MiB."""
    config = LlamaConfig(
        vocab_size=3 << 17,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    make_model(config).save_pretrained(tmp_path)
    load_checkpoint(tmp_path, "float16", unread=True)  # imports
    gc.collect()
    memory, before = StageMemory(), resident_bytes()
    with memory.stage("unread"):
        unread = load_checkpoint(tmp_path, "float16", unread=True)
    with memory.stage("written"):
        weight = weight_tensor(parameters(unread)["lm_head.weight"], "lm_head.weight")
        assert sum(len(part) for part in byte_blocks(weight, 1 << 20)) == 48 << 20
    with memory.stage("read"):
        load_checkpoint(tmp_path, "float16")
    assert memory.peaks["read"] - before > 40 << 20
    assert memory.peaks["unread"] - before < 16 << 20
    assert memory.peaks["written"] - before < 16 << 20


def test_a_single_file_precedes_an_index_as_in_transformers(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"other": "gone.safetensors"}}')
    assert set(stored_tensors(tmp_path)) == set(load_file(tmp_path / "model.safetensors"))
