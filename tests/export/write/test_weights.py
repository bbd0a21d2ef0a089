"""Each weight is stored once, outside the graph when large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from tests.support.tiny_models import make_model
from tests.support.traces import trace
from topw_deploy.export import export_model, write
from topw_deploy.export.embedding import find_embedding
from topw_deploy.export.graph import external_files, tidy
from topw_deploy.export.write import weight_bytes
from topw_deploy.tiny import TINY_MODEL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama_tied", pytest.param("gemma2", marks=pytest.mark.long), "gpt2"])
def test_a_tied_head_uses_the_embedding_table(exported: Callable[[str], Path], family: str) -> None:
    graph = ir.load(exported(family) / "model.onnx").graph
    table = find_embedding(graph).data[0]
    heads = [node for node in graph if node.op_type == "Gemm" and node.inputs[1] is table]
    assert len(heads) == 1
    assert sum(320 in list(value.shape or ()) for value in graph.initializers.values()) == 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
def test_the_file_passes_onnx_own_check(exported: Callable[[str], Path], family: str) -> None:
    onnx.checker.check_model(exported(family) / "model.onnx", full_check=True)


def test_the_file_is_little_larger_than_the_parameters(demo_export: Path) -> None:
    """Initializers within 1 % of the float16 parameters in float32; the sampler function adds about 0.55 MB, always."""
    halves = sum(file.stat().st_size for file in TINY_MODEL.glob("*.safetensors"))
    model = ir.load(demo_export / "model.onnx")
    assert abs(weight_bytes(model) / (2 * halves) - 1) < 0.01
    sampler_bytes = sum(ir.to_proto(function).ByteSize() for function in model.functions.values())
    assert sampler_bytes < 800_000
    assert abs(((demo_export / "model.onnx").stat().st_size - sampler_bytes) / (2 * halves) - 1) < 0.02


def test_equal_but_separate_tables_are_not_tied() -> None:
    model = make_model("llama_untied")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.lm_head.weight[5, 5] += 1
    traced = trace(model)
    table = find_embedding(traced.model.graph).data[0]
    from topw_deploy.export.lowering.concat import lower
    from topw_deploy.export.sampler.attach import last_logits

    lower(traced)
    last_logits(traced.model.graph)
    tidy(traced.model, table)
    assert not [n for n in traced.model.graph if n.op_type == "Gemm" and n.inputs[1] is table]


def test_large_weights_lie_in_one_file_beside_the_graph(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 10_000)
    export_model(checkpoint("llama_tied"), tmp_path / "out", verify=False)
    model = ir.load(tmp_path / "out" / "model.onnx")
    assert set(external_files(model)) == {"model.onnx_data"}
    inline = [v for v in model.graph.initializers.values() if not isinstance(v.const_value, ir.ExternalTensor)]
    assert all(v.const_value is not None and v.const_value.nbytes < 1024 for v in inline)
    ort.InferenceSession(str(tmp_path / "out" / "model.onnx"))
