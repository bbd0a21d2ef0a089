"""The sampler reads 4-bit tables of onnxruntime-genai's builder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.export.embedding import EmbeddingTable, find_embedding
from topw_deploy.export.verification.reference import SamplerProbe
from topw_deploy.export.verification.sampler import sampler_checks
from topw_deploy.manifest import load_manifest
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import Geometry

pytestmark = pytest.mark.long


def dequantised(graph: ir.Graph) -> np.ndarray:
    """The table [vocab, hidden] of a 4-bit GatherBlockQuantized, by definition.

    Two weights per byte, the lower half first; (weight - zero point) * scale of its block; without zero points 8.
    """
    node = next(node for node in graph if node.op_type == "GatherBlockQuantized")
    assert node.attributes["bits"].as_int() == 4
    block = node.attributes["block_size"].as_int()

    def array(place: int) -> np.ndarray:
        value = constant(node.inputs[place])
        return value.reshape([int(size) for size in node.inputs[place].shape])

    packed, scales = array(0).view(np.uint8), array(2)
    weights = halves(packed).astype(np.float32)
    zero = np.full(scales.shape, 8, np.float32)
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        zero = halves(array(3).view(np.uint8))[:, : scales.shape[1]].astype(np.float32)
    return (weights - np.repeat(zero, block, axis=1)) * np.repeat(scales.astype(np.float32), block, axis=1)


def constant(value: ir.Value | None) -> np.ndarray:
    """An initializer, or a reshaped one: a tied head's table is in blocks."""
    assert value is not None
    if value.const_value is not None:
        return value.const_value.numpy()
    producer = value.producer()
    assert producer is not None
    assert producer.op_type == "Reshape"
    return constant(producer.inputs[0])


def halves(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


@pytest.fixture(scope="module")
def tied(imported: Callable) -> Path:
    path: Path = imported("genai-int4-llama-tied").path
    return path


def test_the_tied_table_is_read_in_blocks_and_stored_once(tied: Path) -> None:
    sampler = load_manifest(tied).sampler
    assert sampler.table_form.startswith("com.microsoft.GatherBlockQuantized")
    model = ir.load(tied / "model.onnx")
    assert not any(
        value.const_value is not None
        and value.const_value.dtype == ir.DataType.FLOAT
        and value.const_value.size >= sampler.vocab_size * (sampler.hidden_size or 0)
        for value in model.graph.initializers.values()
    )


def test_its_rows_are_those_of_the_definition(tied: Path) -> None:
    graph = ir.load(tied / "model.onnx").graph
    table = dequantised(graph)
    read = np.asarray(EmbeddingTable(find_embedding(graph)))
    np.testing.assert_allclose(read, table, rtol=1e-6, atol=1e-7)


def test_kept_sets_are_the_references_over_the_dequantised_table(tied: Path) -> None:
    manifest = load_manifest(tied)
    graph = ir.load(tied / "model.onnx").graph
    geometry = Geometry.from_embeddings(dequantised(graph), manifest.sampler.options.metric)
    logits = np.random.default_rng(0).normal(0, 3, (6, manifest.sampler.vocab_size)).astype(np.float32)
    checks = list(sampler_checks(SamplerProbe(tied), manifest.sampler, manifest.defaults, geometry, logits))
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.parametrize("name", ["genai-int4-llama-tied", "genai-int4-llama-untied"])
def test_the_sampler_in_use_draws_what_the_graphs_own_draws(imported: Callable, name: str) -> None:
    """Native if the library reads such a table, else the function."""
    setting = {"lam": 0.5, "init_top_p": 0.3, "temperature": 1.5, "seed": 4, "max_new_tokens": 20, "ignore_eos": True}
    path = imported(name).path
    with TopWModel.from_pretrained(path) as used, TopWModel.from_pretrained(path, sampler="graph") as function:
        assert function.sampler == "graph"
        assert used.generate([5, 9, 30], **setting).token_ids == function.generate([5, 9, 30], **setting).token_ids
