"""The ONNX function: validity, names, inputs, outputs, rejected specs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.support.samples import slow
from tests.support.tail_cases import FORMS, Scenario, Tally, compare, embedding_table, graph, random_case
from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingForm, plain_gather
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.export.tail import TAIL_INPUTS, TailSpec, build_tail, tail_attributes, tail_inputs, tail_outputs
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

OPTIONS = TopWOptions(top_m=20)
FORBIDDEN_FOR_TENSORRT = {"NonZero", "Loop", "Scan", "Range", "ScatterND", "Unique", "Compress"}


def spec(form: str = "portable", **changes: Any) -> TailSpec:
    given = {"options": OPTIONS, "vocab_size": 60, "embedding": plain_gather(60, 4), "hidden_size": 4, "form": form}
    return TailSpec(**{**given, **changes})


def all_nodes(graph: Any) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from all_nodes(attribute.as_graph())


@pytest.mark.slow
@pytest.mark.parametrize("opset", range(18, 25))
@pytest.mark.parametrize("form", FORMS)
def test_every_opset_passes_the_checker_and_equals_the_reference(form: str, opset: int) -> None:
    scenario = Scenario(OPTIONS, 60, 4, "plain", 0)
    table = embedding_table(scenario)
    geometry = Geometry.from_embeddings(table, "mahalanobis")
    full = spec(form, opset=opset, with_mass=True, with_keep_mask=True)
    onnx.checker.check_model(ir.to_proto(sampler_model(full, table, geometry)), full_check=True)
    tally = {form: Tally()}
    rng = np.random.default_rng(opset)
    cases = [random_case(rng, 60) for _ in range(12)]
    compare(scenario, {form: graph(scenario, form, table, geometry, opset)}, geometry, cases, tally)
    assert tally[form].unexplained == []


@pytest.mark.parametrize("form", FORMS)
def test_names_of_nodes_and_values_are_unique_across_subgraphs(form: str) -> None:
    nodes = list(all_nodes(build_tail(spec(form, with_mass=True, with_keep_mask=True))))
    names = Counter(node.name for node in nodes) + Counter(
        v.name for node in nodes for v in node.outputs if not node.name
    )
    assert max(names.values()) == 1
    values = Counter(value.name for node in nodes for value in node.outputs)
    assert max(values.values()) == 1


def test_a_call_without_edits_and_masks_reads_whole_blocks_in_place() -> None:
    options = TopWOptions(metric="uniform")
    large = {vocab: TailSpec(options=options, vocab_size=vocab) for vocab in (8192, 8193)}
    kinds = {vocab: Counter(node.op_type for node in build_tail(wanted)) for vocab, wanted in large.items()}
    assert (kinds[8192]["If"], kinds[8192]["Pad"]) == (6, 0)
    assert (kinds[8193]["If"], kinds[8193]["Pad"]) == (5, 1)


def branches(spec_: TailSpec) -> list[tuple[list[ir.Node], list[ir.Node]]]:
    """(then nodes, else nodes) of each outermost `If`."""
    found = [node for node in build_tail(spec_) if node.op_type == "If"]
    sides = [[node.attributes[name].as_graph() for name in ("then_branch", "else_branch")] for node in found]
    return [(list(all_nodes(then)), list(all_nodes(otherwise))) for then, otherwise in sides]


def test_the_portable_form_has_consecutive_branches_and_the_static_form_none() -> None:
    kinds = {form: Counter(node.op_type for node in all_nodes(build_tail(spec(form)))) for form in FORMS}
    assert kinds["portable"]["If"] == len(branches(spec("portable"))) == 5
    assert kinds["static"]["If"] == 0
    for form in ("portable", "static"):
        assert not FORBIDDEN_FOR_TENSORRT & set(kinds[form])
    assert kinds["onnxruntime"]["If"] == 8
    assert kinds["onnxruntime"]["Loop"] == 1


@pytest.mark.parametrize("rules", [("top_w",), ("top_w", "min_p", "top_p")], ids=",".join)
def test_the_static_form_copies_no_length_from_the_host(rules: tuple[str, ...]) -> None:
    """Shape and Size have their results on the CPU, and CUDA captures no copy from there."""
    kinds = {node.op_type for node in build_tail(spec("static", with_mass=True, rules=rules))}
    assert not {"Shape", "Size"} & kinds


def test_without_geometry_to_skip_the_portable_form_has_one_branch_for_the_pool() -> None:
    assert len(branches(TailSpec(options=TopWOptions(top_m=20, metric="uniform"), vocab_size=60))) == 4


def test_only_the_last_branch_of_the_portable_form_computes_geometry() -> None:
    assert "MatMul" not in {node.op_type for node in build_tail(spec())}
    (unmasked, masked), (fast, ruled), (proven, whole), (settled, pooled), (answered, moved) = branches(spec())
    assert len(unmasked) < len(masked)
    assert "MatMul" not in {node.op_type for node in masked}
    assert not {"MatMul", "Gather", "If"} & {node.op_type for node in (*fast, *proven, *settled, *answered)}
    assert not {"MatMul", "If"} & {node.op_type for node in (*ruled, *whole, *pooled)}
    assert {"MatMul", "Gather"} <= {node.op_type for node in moved}
    assert len(fast) + len(proven) + len(settled) + len(answered) < 30


def test_inputs_outputs_and_attributes_are_those_of_the_contract() -> None:
    full = spec(with_mass=True, with_keep_mask=True, options=TopWOptions(potential="knn", knn_k=3))
    assert tail_inputs(full) == (*TAIL_INPUTS, "mean", "inverse_std", "neighbour_bound", "embedding_0")
    assert tail_outputs(full) == ("next_token", "logprob", "kept", "certified", "mass", "keep_mask")
    assert tail_attributes(full) == {
        "plugin_namespace": "topw", "plugin_version": "1", "top_m": 1200, "alt_iters": 3, "metric": "mahalanobis",
        "knn_k": 3, "table_form": "Gather(axis=0)", "with_mass": 1, "with_keep_mask": 1,
    }  # fmt: skip
    uniform = TailSpec(options=TopWOptions(metric="uniform"), vocab_size=9)
    assert tail_inputs(uniform) == TAIL_INPUTS
    assert tail_attributes(uniform)["table_form"] == ""
    assert tail_attributes(uniform)["with_mass"] == tail_attributes(uniform)["with_keep_mask"] == 0
    function = build_tail(full)
    assert tuple(value.name for value in function.inputs) == tail_inputs(full)
    assert tuple(value.name for value in function.outputs) == tail_outputs(full)
    assert function.opset_imports == {"": 23}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opset": 17}, "opset is 17"),
        ({"opset": 25}, "opset is 25"),
        ({"form": "fast"}, "tail is 'fast'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"embedding": None}, "needs the embedding table"),
    ],
)
def test_an_impossible_spec_is_refused_with_its_bound(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        spec(**changes)


def test_the_text_of_an_embedding_form_does_not_depend_on_the_order_of_attributes() -> None:
    inputs = ((ir.DataType.UINT8, (60, 8)), (ir.DataType.FLOAT, (60, 1)))
    names = (("gather_axis", 0), ("bits", 4), ("quantize_axis", 1), ("block_size", 16))
    wanted = "com.microsoft.GatherBlockQuantized(bits=4,block_size=16,gather_axis=0,quantize_axis=1)"
    for attributes in (names, names[::-1]):
        assert EmbeddingForm("com.microsoft", "GatherBlockQuantized", attributes, inputs, 1).form == wanted
    assert EmbeddingForm("", "Gather", (), ((ir.DataType.FLOAT, (3, 2)),), 1).form == "Gather(axis=0)"


def test_a_gather_over_columns_and_a_misplaced_index_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="axis 1"):
        EmbeddingForm("", "Gather", (("axis", 1),), ((ir.DataType.FLOAT, (3, 2)),), 1)
    with pytest.raises(UnsupportedModelError, match="input 3"):
        EmbeddingForm("", "Gather", (), ((ir.DataType.FLOAT, (3, 2)),), 3)


@pytest.mark.parametrize("form", ["portable", slow("onnxruntime"), slow("static")])
def test_a_quantised_table_is_read_through_its_own_operator(form: str) -> None:
    rng = np.random.default_rng(0)
    vocab, hidden, block = 60, 32, 16
    levels = rng.integers(0, 16, (vocab, hidden)).astype(np.uint8)
    scales = rng.uniform(0.1, 0.3, (vocab, hidden // block)).astype(np.float32)
    packed = levels[:, 0::2] | (levels[:, 1::2] << 4)
    table = (levels.astype(np.float32) - 8) * np.repeat(scales, block, axis=1)
    embedding = EmbeddingForm(
        "com.microsoft",
        "GatherBlockQuantized",
        (("bits", 4), ("block_size", block), ("gather_axis", 0), ("quantize_axis", 1)),
        ((ir.DataType.UINT8, packed.shape), (ir.DataType.FLOAT, scales.shape)),
        1,
    )
    geometry = Geometry.from_embeddings(table, "mahalanobis")
    quantised = spec(form, embedding=embedding, hidden_size=hidden, with_mass=True, with_keep_mask=True)
    model = sampler_model(quantised, packed, geometry)
    graph_ = model.graph
    node = next(iter(graph_))
    extra = ir.Value(name="scales", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(scales.shape))
    extra.const_value = ir.tensor(scales, name="scales")
    graph_.register_initializer(extra)
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, extra)
    model.opset_imports["com.microsoft"] = 1
    opened = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    scenario = Scenario(OPTIONS, vocab, hidden, "plain", 0)
    tally = {form: Tally()}
    compare(scenario, {form: opened}, geometry, [random_case(rng, vocab) for _ in range(64)], tally)
    assert tally[form].unexplained == []


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, slow(ir.DataType.BFLOAT16)])
def test_half_precision_tables_with_more_rows_than_tokens_are_cast_after_the_gather(dtype: ir.DataType) -> None:
    rng = np.random.default_rng(1)
    stored = rng.standard_normal((64, 6)).astype(dtype.numpy())
    geometry = Geometry.from_embeddings(stored[:60].astype(np.float32), "cosine")
    options = TopWOptions(top_m=20, metric="cosine")
    wide = spec(
        options=options, embedding=plain_gather(64, 6, dtype), hidden_size=6, with_mass=True, with_keep_mask=True
    )
    model = ir.to_proto(sampler_model(wide, stored, geometry))
    opened = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tally = {"portable": Tally()}
    cases = [random_case(rng, 60) for _ in range(48)]
    compare(Scenario(options, 60, 6, "plain", 0), {"portable": opened}, geometry, cases, tally)
    assert tally["portable"].unexplained == []
