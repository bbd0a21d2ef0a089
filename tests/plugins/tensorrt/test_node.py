"""Reading and checking a node without TensorRT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from topw_deploy.errors import PluginError
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.tail import TailSpec, tail_attributes, tail_inputs, tail_outputs
from topw_deploy.plugins.tensorrt.node import FIELDS, CallShape, NodeAttributes, TensorDesc, read_call_shape
from topw_deploy.sampling.parameters import TopWOptions

SETTINGS = NodeAttributes(
    top_m=64, alt_iters=3, metric="unit", knn_k=2, table_form="Gather(axis=0)", with_mass=0, with_keep_mask=1
)
UNIFORM = NodeAttributes(top_m=64, alt_iters=3, metric="uniform", knn_k=0, with_mass=0, with_keep_mask=0)


def tensors(
    settings: NodeAttributes, batch: int = 3, vocab: int = 50, edits: int = 2, words: int = 0, bounds: int = 0
) -> list[TensorDesc]:
    shapes = {"logits": (batch, vocab), "edit_ids": (batch, edits), "edit_penalty": (batch, edits),
              "edit_bias": (batch, edits), "allowed": (batch, words), "mean": (8,), "inverse_std": (8,),
              "neighbour_bound": (bounds,), "table": (60, 8), "rule_values": (batch, 2)}  # fmt: skip
    integers = {"edit_ids": "int64", "allowed": "int32", "rule": "int32"}
    return [TensorDesc(integers.get(n, "float32"), shapes.get(n, (batch,))) for n in settings.inputs]


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("options", [TopWOptions(), TopWOptions(metric="uniform", potential="knn", knn_k=7)])
def test_every_attribute_of_the_exporters_nodes_is_read(options: TopWOptions, mass: bool, mask: bool) -> None:
    table = {} if options.metric == "uniform" else {"embedding": plain_gather(50, 8), "hidden_size": 8}
    spec = TailSpec(options=options, vocab_size=50, with_mass=mass, with_keep_mask=mask, **table)
    settings = NodeAttributes.from_fields(tail_attributes(spec))
    assert (settings.top_m, settings.alt_iters, settings.metric) == (options.top_m, options.alt_iters, options.metric)
    assert settings.knn_k == options.neighbours
    assert settings.outputs == tail_outputs(spec)
    assert len(settings.inputs) == len(tail_inputs(spec))
    assert settings.inputs[:17] == tail_inputs(spec)[:17]
    assert set(FIELDS) | {"plugin_namespace", "plugin_version"} == set(tail_attributes(spec))


def test_an_engines_fields_restore_the_attributes() -> None:
    assert tuple(SETTINGS.attribute_fields()) == FIELDS
    assert NodeAttributes.from_fields(SETTINGS.attribute_fields()) == SETTINGS


def test_a_node_without_optional_outputs_has_four() -> None:
    assert UNIFORM.outputs == ("next_token", "logprob", "kept", "certified")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_m": 0}, r"top_m is 0, but must be in \[1,"),
        ({"alt_iters": 2**31}, "alt_iters is 2147483648"),
        ({"knn_k": -1}, "knn_k is -1"),
        ({"with_mass": 2}, r"with_mass is 2, but must be in \[0, 1\]"),
        ({"metric": "euclid"}, "metric is 'euclid', but must be one of mahalanobis"),
        ({"metric": 3}, "metric is 3, which has the wrong type"),
        ({"top_m": "1200"}, "top_m is '1200', which has the wrong type"),
        ({"table_form": "com.microsoft.GatherBlockQuantized(bits=4)"}, "but the plugin reads 'Gather"),
        ({"metric": "uniform"}, "but the plugin reads ''"),
    ],
)
def test_attributes_that_the_kernels_cannot_serve_are_refused(fields: dict[str, int | str], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        NodeAttributes.from_fields({**SETTINGS.attribute_fields(), **fields})


@pytest.mark.parametrize("missing", ["top_m", "alt_iters", "metric", "knn_k", "with_mass", "with_keep_mask"])
def test_a_missing_attribute_is_named(missing: str) -> None:
    fields = {name: value for name, value in SETTINGS.attribute_fields().items() if name != missing}
    with pytest.raises(PluginError, match=f"the node has no {missing}"):
        NodeAttributes.from_fields(fields)


@pytest.mark.parametrize("words", [0, 2])
@pytest.mark.parametrize("bounds", [0, 50])
def test_the_shape_of_a_call_is_read_from_its_inputs(bounds: int, words: int) -> None:
    call = read_call_shape(SETTINGS, tensors(SETTINGS, bounds=bounds, words=words))
    assert call == CallShape(
        node=SETTINGS, batch=3, vocab=50, edits=2, logits_type="float32", tokens=60, hidden=8,
        table_type="float32", bounds=bounds, words=words,
    )  # fmt: skip
    assert read_call_shape(UNIFORM, tensors(UNIFORM)) == CallShape(
        node=UNIFORM, batch=3, vocab=50, edits=2, logits_type="float32"
    )


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("logits", (3,), "logits has shape"),
        ("edit_ids", (2, 2), "edit_ids has shape"),
        ("edit_bias", (3, 1), r"edit_bias has shape \[3, 1\], but must be \[3, 2\]"),
        ("allowed", (3, 1), r"allowed has shape \[3, 1\], but must be \[3, 2\]"),
        ("allowed", (1, 2), r"allowed has shape \[1, 2\], but must be \[3, 2\]"),
        ("allowed", (3,), "allowed has shape"),
        ("lam", (1,), r"lam has shape \[1\], but must be \[3\]"),
        ("rule", (3, 1), r"rule has shape \[3, 1\], but must be \[3\]"),
        ("rule_values", (3,), r"rule_values has shape \[3\], but must be \[3, 2\]"),
        ("mean", (9,), r"mean has shape \[9\], but must be \[8\]"),
        ("neighbour_bound", (49,), r"neighbour_bound has shape \[49\], but must be \[50\]"),
        ("table", (49, 8), "table has 49 rows, but needs one for each of 50 tokens"),
        ("table", (60, 8, 1), "table has shape"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(name: str, shape: tuple[int, ...], said: str) -> None:
    given = tensors(SETTINGS)
    place = SETTINGS.inputs.index(name)
    given[place] = replace(given[place], shape=shape)
    with pytest.raises(PluginError, match=said):
        read_call_shape(SETTINGS, given)


def test_a_node_with_too_few_inputs_is_refused() -> None:
    with pytest.raises(PluginError, match="14 inputs, but its attributes require 18"):
        read_call_shape(SETTINGS, tensors(UNIFORM))
