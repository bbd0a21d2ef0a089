"""The native sampler decodes quantised tables exactly like GatherBlockQuantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.support.function_cases import feeds, open_model, run
from tests.support.kernel import Kernel, KernelTable
from tests.support.quantised_tables import FORMS, Form, Quantised, quantised_table
from tests.support.rows import Case, columns, random_case
from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.sampler.attach import add_sampler_inputs, add_sampler_node, install_function
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.plugins.library import load
from topw_deploy.sampling import Geometry, TopWOptions

VOCAB = 200
OPTIONS = TopWOptions(top_m=120, metric="unit")
# Few rows are certified, so the table is read.
_WIDE = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0}


def cases(rows: int) -> list[Case]:
    rng = np.random.default_rng(rows)
    return [replace(c, parameters=c.parameters | _WIDE) for c in (random_case(rng, VOCAB) for _ in range(rows))]


def tables(quantised: Quantised) -> tuple[KernelTable, KernelTable]:
    """The quantised table, and onnxruntime's float32 rows of it."""
    plain = KernelTable.from_geometry(Geometry.from_embeddings(quantised.rows(), OPTIONS.metric))
    assert plain is not None
    return replace(plain, rows=quantised.codes, blocks=quantised.blocks), plain


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_quantised_table_answers_as_the_rows_that_onnxruntime_reads_from_it(kernel: Kernel, form: Form) -> None:
    quantised, plain = tables(quantised_table(form, VOCAB, 5))
    rows = cases(40)
    logits = np.stack([case.logits for case in rows])
    found, wanted = (
        kernel.sample(logits, columns(rows), OPTIONS, table, mass=True, keep_mask=True) for table in (quantised, plain)
    )
    assert wanted.reports["distances"].sum() > 1000
    for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


def operator_model(quantised: Quantised) -> onnx.ModelProto:
    form = quantised.form
    held = [ir.from_proto(tensor) for tensor in quantised.tensors]
    attributes = {"bits": form.bits, "block_size": form.block_size, "gather_axis": 0, "quantize_axis": 1}
    described = tuple((tensor.dtype, tuple(int(size) for size in tensor.shape)) for tensor in held)
    embedding = EmbeddingForm("com.microsoft", "GatherBlockQuantized", tuple(attributes.items()), described, 1)
    spec = SamplerSpec(
        options=OPTIONS, vocab_size=VOCAB, embedding=embedding, hidden_size=form.hidden, opset=21,
        with_mass=False, with_keep_mask=True,
    )  # fmt: skip
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="sampler")
    editor = GraphEditor(graph, "toy")
    inputs = [editor.input("logits", ir.DataType.FLOAT, ["batch", VOCAB]), *add_sampler_inputs(editor, "batch")]
    geometry = Geometry.from_embeddings(quantised.rows(), OPTIONS.metric)
    for name, values in (("mean", geometry.mean), ("inverse_std", geometry.inverse_std), ("bound", np.zeros(0))):
        inputs.append(editor.constant(np.asarray(values, dtype=np.float32), name))
    inputs += [editor.initializer(tensor, str(tensor.name)) for tensor in held]
    graph.outputs.extend(add_sampler_node(graph, spec, inputs, "batch"))
    model = ir.Model(graph, ir_version=10)
    install_function(model, spec)
    return ir.to_proto(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_operator_takes_the_nodes_own_tensors_and_answers_as_the_function(native_library: Path, form: Form) -> None:
    quantised = quantised_table(form, VOCAB, 6)
    model, rows = operator_model(quantised), cases(24)
    library = load(native_library)
    before = library.assigned_nodes
    native = run(open_model(model, native_library), feeds(rows))
    assert library.assigned_nodes == before + 1
    table, _ = tables(quantised)
    exact = Kernel(native_library).sample(
        np.stack([case.logits for case in rows]), columns(rows), OPTIONS, table, keep_mask=True
    )
    np.testing.assert_array_equal(native["next_token"], exact.next_token)
    np.testing.assert_array_equal(native["keep_mask"], exact.keep_mask)
    function = run(open_model(model), feeds(rows))
    same = (native["keep_mask"] == function["keep_mask"]).all(axis=1)
    assert same.mean() > 0.9  # float32 distances: near ties may differ


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("Gather(axis=0)", True),
        ("com.microsoft.GatherBlockQuantized(bits=4,block_size=32,gather_axis=0,quantize_axis=1)", True),
        ("com.microsoft.GatherBlockQuantized(bits=8,block_size=16,gather_axis=0,quantize_axis=-1)", True),
        ("com.microsoft.GatherBlockQuantized(block_size=32,quantize_axis=1)", True),
        ("com.microsoft.GatherBlockQuantized()", True),
        ("com.microsoft.GatherBlockQuantized(bits=2,block_size=32,gather_axis=0,quantize_axis=1)", False),
        ("com.microsoft.GatherBlockQuantized(bits=4,block_size=33,gather_axis=0,quantize_axis=1)", False),
        ("com.microsoft.GatherBlockQuantized(bits=4,block_size=32,gather_axis=1,quantize_axis=1)", False),
        ("com.microsoft.GatherBlockQuantized(bits=4,block_size=32,gather_axis=0,quantize_axis=0)", False),
        ("com.microsoft.GatherBlockQuantized(bits=4,block_size=32,gather_axis=0,quantize_axis=1,more=1)", False),
        ("com.microsoft.GatherBlockQuantized(bits=,block_size=32)", False),
        ("com.microsoft.GatherBlockQuantized(bits=4", False),
        ("GatherBlockQuantized(bits=4)", False),
    ],
)
def test_forms_are_known_by_their_text(native_library: Path, text: str, known: bool) -> None:
    assert load(native_library).supports(text) is known


def test_a_node_whose_parts_do_not_fit_runs_the_function(native_library: Path) -> None:
    model = operator_model(quantised_table(Form(), VOCAB, 7))
    (scales,) = [tensor for tensor in model.graph.initializer if tensor.name == "scales"]
    cut = onnx.numpy_helper.to_array(scales)[:, :2]
    scales.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(cut), "scales"))
    for value in [*model.graph.value_info]:
        if value.name == "scales":
            model.graph.value_info.remove(value)
    with pytest.raises(Exception, match="do not fit together"):
        open_model(model, native_library)
