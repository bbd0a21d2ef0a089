"""Rows of other rules: from the largest logits where these prove the kept set, else from the whole vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tests.support.function_cases import by_hand, feeds, run, unexplained
from tests.support.rows import Case, Scenario, random_case
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.sampler.thresholds import LIST
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.rules import RULES

VOCAB = 4096
CANDIDATES, WHOLE = "candidates", "vocabulary"
OPTIONS = TopWOptions(top_m=300, metric="uniform")
STEP = 0.005
FALLING = np.random.default_rng(0).permutation(-STEP * np.arange(VOCAB)).astype(np.float32)
"""Different logits, in no order of ids."""


@cache
def model() -> onnx.ModelProto:
    spec = SamplerSpec(options=OPTIONS, vocab_size=VOCAB, with_mass=True, with_keep_mask=True)
    return ir.to_proto(sampler_model(spec, None, Geometry.uniform()))


@cache
def session() -> ort.InferenceSession:
    return ort.InferenceSession(model().SerializeToString(), providers=["CPUExecutionProvider"])


def steps(batches: list[list[Case]], folder: Path) -> list[str | int]:
    """What the function read last for other rules in each batch: CANDIDATES, LIST, or WHOLE."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    profiled = ort.InferenceSession(model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    for batch in batches:
        run(profiled, feeds(batch))
    events = json.loads(Path(profiled.end_profiling()).read_text())
    runs = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "model_run"]
    nodes = [event for event in events if event["cat"] == "Node"]
    return [_last_step([node["name"] for node in nodes if start <= node["ts"] <= end]) for start, end in runs]


def _last_step(names: list[str]) -> str | int:
    if any("_search_threshold" in name for name in names):
        return WHOLE
    return LIST if any("list_tokens" in name for name in names) else CANDIDATES


def differences(cases: list[Case]) -> list[str]:
    scenario = Scenario(OPTIONS, VOCAB, 8, "plain", 0)
    return unexplained("branches", scenario, Geometry.uniform(), cases, run(session(), feeds(cases)))


def steep(place: int) -> np.ndarray:
    """Nearly equal logits, with a drop of 9 behind a place."""
    logits = FALLING / 10
    return np.where(np.argsort(np.argsort(-logits)) < place, logits, logits - 9).astype(np.float32)


PROVEN = {
    "top_k": by_hand(FALLING, "top_k", 200),
    "top_p": by_hand(FALLING, "top_p", 0.95),
    "min_p": by_hand(FALLING, "min_p", 0.05),
    "top_h": by_hand(FALLING, "top_h", 0.8, 1000),
    "typical": by_hand(FALLING, "typical", 0.9),
    "epsilon": by_hand(FALLING, "epsilon", 1e-3),
    "eta": by_hand(FALLING, "eta", 1e-3),
    "top_n_sigma": by_hand(FALLING, "top_n_sigma", 0.5),
    "p_less": by_hand(FALLING, "p_less"),
    "min_k": by_hand(steep(100), "min_k"),
    "none": by_hand(np.where(FALLING >= -STEP * 1000, FALLING, -np.inf), "none"),
}


def test_the_list_proves_rows_of_every_rule(tmp_path: Path) -> None:
    assert set(PROVEN) == set(RULES) - {"top_w"}
    cases = [replace(case, uniform=uniform) for case in PROVEN.values() for uniform in (0.61, 0.99999)]
    assert differences(cases) == []
    assert set(steps([[case] for case in cases], tmp_path)) == {LIST}


def test_one_row_takes_its_batch_to_a_longer_list(tmp_path: Path) -> None:
    top_w, short, whole = (by_hand(FALLING, name, 60) for name in ("top_w", "top_k", "none"))
    assert steps([[top_w], [top_w, short], [top_w, short, whole]], tmp_path) == [CANDIDATES, LIST, WHOLE]


def levels(first: int, tied: int) -> np.ndarray:
    """`first` different logits, `tied` equal ones below, and all others far below; in no order of ids."""
    sizes = (first, tied, VOCAB - first - tied)
    values = np.concatenate([1 - 1e-4 * np.arange(first), np.full(sizes[1], 0.5), np.full(sizes[2], -30.0)])
    return np.random.default_rng(1).permutation(values).astype(np.float32)


ENDS = [
    (by_hand(FALLING, "top_k", LIST - 1), LIST),
    (by_hand(FALLING, "top_k", LIST), WHOLE),  # the last token of the list could tie with one behind it
    (by_hand(FALLING, "top_k", LIST + 1), WHOLE),
    (by_hand(levels(900, 50), "top_k", 930), LIST),  # the cut is among equal logits, all of them in the list
    (by_hand(levels(900, 200), "top_k", 930), WHOLE),  # equal logits on both sides of the list's end
    (by_hand(levels(900, 200), "top_k", 900), LIST),  # all kept tokens are above them
    (by_hand(levels(900, LIST - 901), "min_p", 0.1), LIST),
    (by_hand(levels(900, LIST - 900), "min_p", 0.1), WHOLE),
    (by_hand(levels(900, LIST - 901), "top_p", 0.9999), LIST),
    (by_hand(levels(900, LIST - 899), "top_p", 0.9999), WHOLE),
    (by_hand(levels(0, VOCAB), "top_k", 100), WHOLE),
    (by_hand(FALLING, "top_h", 0.5, LIST), LIST),
    (by_hand(FALLING, "top_h", 0.5, LIST + 1), WHOLE),  # the pool is longer than the list
]


@pytest.mark.slow
def test_rows_at_the_end_of_the_list_keep_and_draw_by_the_definition(tmp_path: Path) -> None:
    batches = [[replace(case, uniform=u) for u in (0.0, 0.3, 0.777, 0.99999994)] for case, _ in ENDS]
    assert differences([case for batch in batches for case in batch]) == []
    assert steps(batches, tmp_path) == [step for _, step in ENDS]


def test_a_rows_bits_do_not_depend_on_the_steps_that_other_rows_need() -> None:
    rng = np.random.default_rng(5)
    short, whole = by_hand(FALLING, "top_k", 50), by_hand(FALLING, "none")
    cases = [*PROVEN.values(), short, whole, *(random_case(rng, VOCAB) for _ in range(4))]
    cases = [replace(case, uniform=float(rng.random(dtype=np.float32))) for case in cases]
    cases.append(replace(short, rule_values=(-1.0, 0.0)))
    alone = [run(session(), feeds([case])) for case in cases]
    order = rng.permutation(len(cases))
    together = run(session(), feeds([cases[index] for index in order]))
    for name, values in together.items():
        assert np.array_equal(values, np.concatenate([alone[index][name] for index in order])), name


def test_lists_do_not_depend_on_how_topk_orders_equal_logits() -> None:
    """Half-precision logits have many equal values, and providers' sorts may have no tie rule."""
    rounded = np.round(FALLING * 32) / 32  # about six tokens of each value
    cases = [
        by_hand(rounded, "top_k", 203), by_hand(rounded, "top_p", 0.93), by_hand(rounded, "top_h", 0.7, 100),
        by_hand(rounded, "min_p", 0.05), by_hand(rounded, "typical", 0.9), by_hand(rounded * 32, "top_w"),
    ]  # fmt: skip
    cases = [replace(case, uniform=uniform) for case in cases for uniform in (0.1, 0.55, 0.9)]
    wanted = run(session(), feeds(cases))
    found = ReferenceEvaluator(inline_local_functions(model()), new_ops=[TopK, GatherElements]).run(
        list(wanted), feeds(cases)
    )
    for (name, values), other in zip(wanted.items(), found, strict=True):
        np.testing.assert_allclose(other, values, rtol=1e-5, err_msg=name)


class TopK(OpRun):
    """Sorts equal numbers by descending index, as ONNX does not."""

    op_domain = ""

    def _run(self, x: np.ndarray, k: np.ndarray, axis: Any = None, largest: Any = None, sorted: Any = None) -> Any:
        width = x.shape[axis]
        order = width - 1 - np.argsort(np.flip(-x if largest else x, axis), axis=axis, kind="stable")
        chosen = np.take(order, np.arange(int(k[0])), axis=axis)
        return np.take_along_axis(x, chosen, axis), chosen


class GatherElements(OpRun):
    """The evaluator's own reads only one index a row."""

    op_domain = ""

    def _run(self, x: np.ndarray, index: np.ndarray, axis: Any = None) -> Any:
        return (np.take_along_axis(x, index, axis),)
