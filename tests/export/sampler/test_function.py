"""The function as a whole: against the reference, its inputs, outputs and branches, rejected specs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.support.function_cases import FORMS, NATIVE, compared, feeds, graph, run
from tests.support.rows import Scenario, embedding_table, random_case
from tests.support.samples import slow
from topw_deploy.errors import ParameterError
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.sampler.function import build_function
from topw_deploy.export.sampler.node import (
    SAMPLER_INPUTS,
    SamplerSpec,
    sampler_attributes,
    sampler_inputs,
    sampler_outputs,
)
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

OPTIONS = TopWOptions(top_m=20)
SCENARIOS = [
    Scenario(TopWOptions(top_m=1200), 53, 8, "near-duplicates", 1),
    Scenario(TopWOptions(top_m=40, metric="unit", potential="knn"), 997, 16, "duplicates", 2),
    Scenario(TopWOptions(top_m=90, metric="cosine", alt_iters=9), 1000, 16, "clusters", 3),
    Scenario(TopWOptions(top_m=60, metric="uniform", alt_iters=1), 5000, 4, "plain", 4),
    Scenario(TopWOptions(top_m=7, metric="cosine", potential="knn", knn_k=2), 300, 5, "zeros", 5),
    Scenario(TopWOptions(top_m=1, metric="uniform"), 129, 4, "plain", 6),
    Scenario(TopWOptions(top_m=80, potential="knn", knn_k=100, alt_iters=2), 400, 12, "clusters", 7),
    Scenario(TopWOptions(top_m=60), 151_936, 4, "plain", 8),
]
ALWAYS = (53, 129, 300, 151_936)  # vocabularies; the others in CI

FORBIDDEN_FOR_TENSORRT = {"NonZero", "Loop", "Scan", "Range", "ScatterND", "Unique", "Compress"}


def spec(form: str = "branches", **changes: Any) -> SamplerSpec:
    given = {"options": OPTIONS, "vocab_size": 60, "embedding": plain_gather(60, 4), "hidden_size": 4}
    return SamplerSpec(branches=form == "branches", **{**given, **changes})


def all_nodes(graph: Any) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from all_nodes(attribute.as_graph())


def open_scenario(scenario: Scenario, form: str, threads: int = 1) -> tuple[Geometry, ort.InferenceSession]:
    table, metric = embedding_table(scenario), scenario.options.metric
    geometry = Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(table, metric)
    return geometry, graph(scenario, form, table, geometry, threads=threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.name, marks=() if each.vocab_size in ALWAYS else pytest.mark.long)
        for each in SCENARIOS
    ],
)
@pytest.mark.parametrize("form", [*FORMS, NATIVE])
def test_kept_sets_tokens_and_certificates_equal_the_reference(form: str, scenario: Scenario) -> None:
    if form == NATIVE and library_path() is None:
        pytest.skip("no native sampler")
    geometry, session = open_scenario(scenario, form)
    rng = np.random.default_rng(scenario.seed)
    for _ in range(2 if scenario.vocab_size > 100_000 else 5):
        cases = [random_case(rng, scenario.vocab_size) for _ in range(8 if scenario.vocab_size > 100_000 else 48)]
        most = 0.0 if form == NATIVE else 0.05  # the operator decides in float64
        assert compared(scenario, geometry, session, cases, most) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [1, slow(2), slow(127), slow(128), slow(129)])
def test_the_smallest_vocabularies_work(form: str, vocab: int) -> None:
    scenario, rng = Scenario(TopWOptions(), vocab, 4, "plain", vocab), np.random.default_rng(0)
    assert compared(scenario, *open_scenario(scenario, form), [random_case(rng, vocab) for _ in range(16)]) == []


@pytest.mark.parametrize("form", ["branches", slow("no-branches")])
def test_no_crop_holds_a_banned_token_with_several_threads(form: str) -> None:
    """J of a prefix with banned tokens differs only in the last bit."""
    scenario = Scenario(TopWOptions(top_m=200, metric="cosine"), 600, 16, "plain", 1)
    _, session = open_scenario(scenario, form, threads=2)
    rng = np.random.default_rng(0)
    cases = [random_case(rng, scenario.vocab_size) for _ in range(64)]
    for case in cases:
        case.logits[rng.permutation(scenario.vocab_size)[8:]] = -np.inf
        case.parameters.update(lam=0.06, beta=1.5, temperature=0.9, selection_temperature=0.0, geom_scale=-1.0)
    inputs = feeds(cases)
    for _ in range(4):
        inputs["logits"] = np.roll(inputs["logits"], 1, axis=0)
        masks = run(session, inputs)["keep_mask"]
        assert not (masks & np.isinf(inputs["logits"])).any()


@pytest.mark.slow
@pytest.mark.parametrize("opset", range(18, 25))
@pytest.mark.parametrize("form", FORMS)
def test_every_opset_passes_the_checker_and_equals_the_reference(form: str, opset: int) -> None:
    scenario = Scenario(OPTIONS, 60, 4, "plain", 0)
    table = embedding_table(scenario)
    geometry = Geometry.from_embeddings(table, "mahalanobis")
    full = spec(form, opset=opset, with_mass=True, with_keep_mask=True)
    onnx.checker.check_model(ir.to_proto(sampler_model(full, table, geometry)), full_check=True)
    rng = np.random.default_rng(opset)
    session = graph(scenario, form, table, geometry, opset=opset)
    assert compared(scenario, geometry, session, [random_case(rng, 60) for _ in range(12)]) == []


@pytest.mark.parametrize("form", FORMS)
def test_names_of_nodes_and_values_are_unique_across_subgraphs(form: str) -> None:
    nodes = list(all_nodes(build_function(spec(form, with_mass=True, with_keep_mask=True))))
    names = Counter(node.name for node in nodes) + Counter(
        v.name for node in nodes for v in node.outputs if not node.name
    )
    assert max(names.values()) == 1
    values = Counter(value.name for node in nodes for value in node.outputs)
    assert max(values.values()) == 1


def branches(spec_: SamplerSpec) -> list[tuple[list[ir.Node], list[ir.Node]]]:
    """(then nodes, else nodes) of each outermost `If`."""
    found = [node for node in build_function(spec_) if node.op_type == "If"]
    sides = [[node.attributes[name].as_graph() for name in ("then_branch", "else_branch")] for node in found]
    return [(list(all_nodes(then)), list(all_nodes(otherwise))) for then, otherwise in sides]


def kinds(nodes: Iterator[ir.Node]) -> Counter[str]:
    return Counter(node.op_type for node in nodes)


def test_a_call_without_edits_and_masks_reads_whole_blocks_in_place() -> None:
    for vocab, ifs, pads in ((8192, 6, 0), (8193, 5, 1)):
        outer = kinds(build_function(SamplerSpec(options=TopWOptions(metric="uniform"), vocab_size=vocab)))
        assert (outer["If"], outer["Pad"]) == (ifs, pads)


@pytest.mark.parametrize("vocab", [60, 8192])
def test_branches_are_consecutive_and_without_them_there_is_no_control_flow(vocab: int) -> None:
    large = {"vocab_size": vocab, "embedding": plain_gather(vocab, 4)}
    with_, without = (kinds(all_nodes(build_function(spec(form, **large)))) for form in FORMS)
    assert with_["If"] == len(branches(spec(**large)))
    assert without["If"] == 0
    assert not FORBIDDEN_FOR_TENSORRT & (set(with_) | set(without))


@pytest.mark.parametrize("rules", [("top_w",), ("top_w", "min_p", "top_p")], ids=",".join)
def test_without_branches_no_length_is_copied_from_the_host(rules: tuple[str, ...]) -> None:
    """Shape and Size have their results on the CPU, and CUDA captures no copy from there."""
    found = kinds(build_function(spec("no-branches", with_mass=True, rules=rules)))
    assert not {"Shape", "Size"} & set(found)


def test_inputs_outputs_and_attributes_are_those_of_the_contract() -> None:
    full = spec(with_mass=True, with_keep_mask=True, options=TopWOptions(potential="knn", knn_k=3))
    assert sampler_inputs(full) == (*SAMPLER_INPUTS, "mean", "inverse_std", "neighbour_bound", "embedding_0")
    assert sampler_outputs(full) == ("next_token", "logprob", "kept", "certified", "mass", "keep_mask")
    assert sampler_attributes(full) == {
        "plugin_namespace": "topw", "plugin_version": "1", "top_m": 1200, "alt_iters": 3, "metric": "mahalanobis",
        "knn_k": 3, "table_form": "Gather(axis=0)", "with_mass": 1, "with_keep_mask": 1,
    }  # fmt: skip
    uniform = SamplerSpec(options=TopWOptions(metric="uniform"), vocab_size=9)
    assert sampler_inputs(uniform) == SAMPLER_INPUTS
    assert sampler_attributes(uniform)["table_form"] == ""
    assert sampler_attributes(uniform)["with_mass"] == sampler_attributes(uniform)["with_keep_mask"] == 0
    function = build_function(full)
    assert tuple(value.name for value in function.inputs) == sampler_inputs(full)
    assert tuple(value.name for value in function.outputs) == sampler_outputs(full)
    assert function.opset_imports == {"": 23}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opset": 17}, "opset is 17"),
        ({"opset": 25}, "opset is 25"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"embedding": None}, "needs the embedding table"),
        ({"rules": ("top_x",)}, "rules has 'top_x'"),
    ],
)
def test_an_impossible_spec_is_refused_with_its_bound(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        spec(**changes)


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
    scenario = Scenario(options, 60, 6, "plain", 0)
    assert compared(scenario, geometry, opened, [random_case(rng, 60) for _ in range(48)]) == []
