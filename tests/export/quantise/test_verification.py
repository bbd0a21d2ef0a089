"""Quantised exports are checked against dequantised weights and report the rounding cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from transformers import AutoModelForCausalLM

from tests.support.samples import sampled
from topw_deploy.errors import ParameterError, VerificationError
from topw_deploy.export import export_model
from topw_deploy.export.quantise import Quantisation
from topw_deploy.export.quantise import blocks as weight_module
from topw_deploy.export.quantise.blocks import QuantisedWeight, ReadRows, WeightBlocks
from topw_deploy.export.verification.dequantise import dequantise_model
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.long

CASES = {
    "llama_tied": {"dtype": "int4", "block_size": 16},
    "gpt2": {"dtype": "int8", "symmetric": False},
    "qwen2": {"dtype": "int4", "kv": "concat", "exclude_nodes": ("node_linear_3",)},
    "gemma3": {"dtype": "int4", "compute_dtype": "fp16", "exclude_nodes": ("node_linear_3",)},
}


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """family -> its verified export."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("quantised") / family
            export_model(checkpoint(family), made[family], **CASES[family])  # type: ignore[arg-type]
        return made[family]

    return folder


@pytest.mark.long
@pytest.mark.parametrize("family", sampled(CASES, ("llama_tied", "gemma3"), ()))
def test_an_export_agrees_with_its_dequantised_weights_and_reports_the_cost_of_rounding(
    verified: Callable[[str], Path], family: str
) -> None:
    manifest = load_decoder_manifest(verified(family))
    assert manifest.decoder.weights_dtype == CASES[family]["dtype"]
    checks = {check.name: check for check in manifest.verification.checks}
    assert manifest.verification.status == "passed"
    assert "dequantised" in checks["prefill logits"].detail
    # float32 rounding over two layers; float16 keeps 13 bits less. Quantisation changes logits by over 0.01.
    assert 0 < checks["prefill logits"].difference < (2e-3 if manifest.decoder.kv_dtype == "float16" else 2e-6)
    notes = {note.name: note.text for note in manifest.verification.notes}
    assert "no better than guessing" in notes["perplexity, log of the ratio"]
    assert "in float32" in notes["perplexity, log of the ratio"]
    assert {"kept sets compared with float32", "tokens compared with float32"} <= set(notes)
    assert not set(notes) & set(checks)


@pytest.mark.parametrize("branches", [True, False])
def test_every_form_of_the_sampler_reads_the_quantised_table(
    branches: bool, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    how = {"dtype": "int4", "block_size": 32, "table_bits": 4, "symmetric": True}
    export_model(checkpoint("llama_tied"), tmp_path / "out", **how, branches=branches, verify=False)
    settings = {"max_new_tokens": 12, "seed": 3, "temperature": 2.0, "lam": 1.0, "init_top_p": 0.5, "ignore_eos": True}
    with TopWModel.from_pretrained(tmp_path / "out", sampler="graph") as model:
        tokens = model.generate([5, 9, 7], **settings).token_ids
    assert len(tokens) == 12
    manifest = load_decoder_manifest(tmp_path / "out")
    assert manifest.sampler.table_form.startswith("com.microsoft.GatherBlockQuantized(bits=4,block_size=32")


def test_wrong_zero_points_in_one_weight_fail_the_verification(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = weight_module.quantise_weight
    seen: list[int] = []

    def wrong(read: ReadRows, weight: QuantisedWeight, *, positive: bool) -> WeightBlocks:
        made = plain(read, weight, positive=positive)
        seen.append(1)
        if len(seen) == 3:
            assert made.zero_points is not None
            made.zero_points[:] ^= 0x11
        return made

    monkeypatch.setattr(weight_module, "quantise_weight", wrong)
    with pytest.raises(VerificationError, match="rounding of the weights"):
        export_model(checkpoint("llama_tied"), tmp_path / "out", dtype="int4", calibration="none")
    assert not (tmp_path / "out").exists()


def test_layers_that_the_export_keeps_in_float_are_not_rounded(
    verified: Callable[[str], Path], checkpoint: Callable[[str], Path]
) -> None:
    folder = verified("qwen2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert dequantise_model(model, folder, Quantisation(bits=4))[0].passed
    same = {name for name, value in model.named_parameters() if np.array_equal(value.detach(), before[name])}
    matrices = {name for name, value in before.items() if value.dim() == 2}
    assert same & matrices == {"model.layers.0.self_attn.o_proj.weight"}


def test_a_compute_dtype_applies_to_everything_but_the_weights(verified: Callable[[str], Path]) -> None:
    manifest = load_decoder_manifest(verified("gemma3"))
    assert (manifest.decoder.weights_dtype, manifest.decoder.kv_dtype) == ("int4", "float16")
    graph = ir.load(verified("gemma3") / "model.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert {node.inputs[2].dtype for node in products} == {ir.DataType.FLOAT16}
    (lookup,) = [node for node in graph if node.op_type == "GatherBlockQuantized"]
    assert lookup.inputs[2].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize("dtype", [None, "fp16", "bf16"])
def test_a_compute_dtype_is_refused_without_quantised_weights(dtype: str | None, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="compute_dtype is an option for quantised weights"):
        export_model("tiny", tmp_path, dtype=dtype, compute_dtype="fp16")
    with pytest.raises(ParameterError, match="compute_dtype is 'bf16', but must be one of fp32, fp16"):
        export_model("tiny", tmp_path, dtype="int4", compute_dtype="bf16")


def test_tensorrts_products_read_positive_symmetric_blocks(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    export_model(checkpoint("llama_untied"), tmp_path / "out", dtype="int4", target="tensorrt", max_length=64)
    manifest, graph = load_decoder_manifest(tmp_path / "out"), ir.load(tmp_path / "out" / "model.onnx").graph
    assert manifest.verification.status == "passed"
    assert not any(node.domain == "com.microsoft" for node in graph)
    lookups = [node for node in graph if node.op_type == "DequantizeLinear"]
    assert len(lookups) == 8  # of each layer q, k and v; output; gate and up; down
    types = {node.inputs[0].dtype for node in lookups}  # type: ignore[union-attr]
    assert ir.DataType.INT4 in types <= {ir.DataType.INT4, ir.DataType.INT8}
    assert all((node.inputs[1].const_value.numpy() > 0).all() for node in lookups)  # type: ignore[union-attr]
    assert set(manifest.decoder.weights) >= {"int4", "float"}  # the table and the head
