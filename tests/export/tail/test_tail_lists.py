"""Rows of other rules that the candidates do not prove: the list of the `top_m` largest logits, then the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.support.samples import slow
from tests.support.tail_cases import Case, Scenario, by_hand, feeds, random_case, run, unexplained
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.export.tail import TailSpec
from topw_deploy.export.tail.inputs import PARAMETERS, padded_width, row_parameters
from topw_deploy.export.tail.ops import EagerOps
from topw_deploy.export.tail.rules.answer import list_answer, list_length
from topw_deploy.export.tail.rules.inputs import row_rules
from topw_deploy.export.tail.rules.statistics import row_statistics
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.rules import RULES

VOCAB, POOL, LIST = 4096, 300, 288  # the list is a multiple of 16
CANDIDATES, WHOLE = "candidates", "vocabulary"
FORMS = ("portable", slow("onnxruntime"))
OPTIONS = TopWOptions(top_m=POOL, metric="uniform")


def spec(form: str, **changes: Any) -> TailSpec:
    given = {"options": OPTIONS, "vocab_size": VOCAB, "with_mass": True, "with_keep_mask": True}
    return TailSpec(form=form, **{**given, **changes})


@cache
def model(form: str) -> bytes:
    return ir.to_proto(sampler_model(spec(form), None, Geometry.uniform())).SerializeToString()


@cache
def session(form: str) -> ort.InferenceSession:
    return ort.InferenceSession(model(form), providers=["CPUExecutionProvider"])


def steps(form: str, batches: list[list[Case]], folder: Path) -> list[str | int]:
    """What the function read last for other rules in each batch: CANDIDATES, the length of the list, or WHOLE."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    profiled = ort.InferenceSession(model(form), options, providers=["CPUExecutionProvider"])
    for batch in batches:
        run(profiled, feeds(batch))
    events = json.loads(Path(profiled.end_profiling()).read_text())
    runs = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "model_run"]
    nodes = [event for event in events if event["cat"] == "Node"]
    return [_last_step([node for node in nodes if start <= node["ts"] <= end]) for start, end in runs]


def _last_step(nodes: list[dict[str, Any]]) -> str | int:
    sorts = [node for node in nodes if node["args"].get("op_name") == "TopK" and "sorted_list" in node["name"]]
    lengths = {sort["args"]["output_type_shape"][0]["float"][-1] for sort in sorts}
    if VOCAB in lengths or any("kept_tokens" in node["name"] for node in nodes):
        return WHOLE
    return max(lengths, default=CANDIDATES)


def differences(form: str, cases: list[Case]) -> list[str]:
    scenario = Scenario(OPTIONS, VOCAB, 8, "plain", 0)
    return unexplained(form, scenario, Geometry.uniform(), cases, run(session(form), feeds(cases)))


def falling(step: float = 0.02) -> np.ndarray:
    """Different logits, in no order of ids."""
    return np.random.default_rng(0).permutation(-step * np.arange(VOCAB)).astype(np.float32)


def steep(place: int) -> np.ndarray:
    """Nearly equal logits, with a drop of 9 behind a place."""
    logits = falling(0.0005)
    return np.where(np.argsort(np.argsort(-logits)) < place, logits, logits - 9).astype(np.float32)


PROVEN = {
    "top_k": by_hand(falling(), "top_k", 200),
    "top_p": by_hand(falling(), "top_p", 0.95),
    "min_p": by_hand(falling(), "min_p", 0.05),
    "top_h": by_hand(falling(0.005), "top_h", 0.8, 100),
    "top_h, pool beyond the list": by_hand(falling(), "top_h", 0.6, 300),
    "typical": by_hand(falling(), "typical", 0.9),
    "epsilon": by_hand(falling(), "epsilon", 1e-3),
    "eta": by_hand(falling(), "eta", 1e-3),
    "top_n_sigma": by_hand(falling(0.001), "top_n_sigma", 0.1),
    "p_less": by_hand(steep(200), "p_less"),
    "min_k": by_hand(steep(100), "min_k"),
    "none": by_hand(np.where(falling() >= -0.02 * 150, falling(), -np.inf), "none"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_list_proves_more_than_the_candidates_under_every_rule(form: str, tmp_path: Path) -> None:
    assert {name.split(",")[0] for name in PROVEN} == set(RULES) - {"top_w"}
    cases = [replace(case, uniform=uniform) for case in PROVEN.values() for uniform in (0.61, 0.99999)]
    assert differences(form, cases) == []
    assert set(steps(form, [[case] for case in cases], tmp_path)) == {LIST}


@pytest.mark.parametrize("form", FORMS)
def test_the_candidates_need_no_list_and_the_list_no_vocabulary(form: str, tmp_path: Path) -> None:
    short = [by_hand(falling(), "top_k", 60), by_hand(falling(), "min_p", 0.5), by_hand(falling(), "top_w")]
    batches = [short, [*short, PROVEN["top_h"]], [*short, by_hand(falling(), "none")]]
    assert steps(form, batches, tmp_path) == [CANDIDATES, LIST, WHOLE]


@pytest.mark.parametrize("form", FORMS)
def test_invalid_rows_cost_the_list_and_not_the_vocabulary(form: str, tmp_path: Path) -> None:
    fine = PROVEN["top_k"]
    broken = [
        replace(fine, rule_values=(0.5, 0.0)),
        replace(fine, rule=12),
        replace(fine, logits=np.where(np.arange(VOCAB) == 7, np.nan, fine.logits).astype(np.float32)),
        replace(fine, logits=np.full(VOCAB, -np.inf, np.float32)),
    ]
    found = run(session(form), feeds([*broken, fine]))
    assert found["next_token"][:-1].tolist() == [-1] * len(broken)
    assert found["kept"].tolist() == [0] * len(broken) + [200]
    assert not found["keep_mask"][:-1].any()
    assert steps(form, [broken], tmp_path) == [LIST]


def levels(first: int, tied: int) -> np.ndarray:
    """`first` different logits, `tied` equal ones below, and all others far below; in no order of ids."""
    sizes = (first, tied, VOCAB - first - tied)
    values = np.concatenate([1 - 1e-3 * np.arange(first), np.full(sizes[1], 0.5), np.full(sizes[2], -30.0)])
    return np.random.default_rng(1).permutation(values).astype(np.float32)


ENDS = [
    (by_hand(falling(), "top_k", LIST - 1), LIST),
    (by_hand(falling(), "top_k", LIST), WHOLE),  # the last token of the list could tie with one behind it
    (by_hand(falling(), "top_k", LIST + 1), WHOLE),
    (by_hand(falling(), "top_k", POOL), WHOLE),
    (by_hand(levels(200, 50), "top_k", 230), LIST),  # the cut is among equal logits, all of them in the list
    (by_hand(levels(200, 200), "top_k", 230), WHOLE),  # equal logits on both sides of the list's end
    (by_hand(levels(200, 200), "top_k", 200), LIST),  # all kept tokens are above them
    (by_hand(levels(200, 87), "min_p", 0.1), LIST),
    (by_hand(levels(200, 88), "min_p", 0.1), WHOLE),
    (by_hand(levels(200, 89), "min_p", 0.1), WHOLE),
    (by_hand(levels(200, 87), "top_p", 0.999), LIST),
    (by_hand(levels(200, 89), "top_p", 0.999), WHOLE),
    (by_hand(levels(0, VOCAB), "top_k", 100), WHOLE),
]


@pytest.mark.parametrize("form", FORMS)
def test_rows_at_the_end_of_the_list_keep_and_draw_by_the_definition(form: str, tmp_path: Path) -> None:
    batches = [[replace(case, uniform=u) for u in (0.0, 0.3, 0.777, 0.99999994)] for case, _ in ENDS]
    assert differences(form, [case for batch in batches for case in batch]) == []
    assert steps(form, batches, tmp_path) == [step for _, step in ENDS]


def with_finite(number: int) -> list[Case]:
    """Rows of every other rule with as many finite logits; most keep all of them."""
    logits = np.where(falling() > -0.02 * number, falling(), -np.inf).astype(np.float32)
    assert np.isfinite(logits).sum() == number
    values = {"top_h": (0.9, 1000.0), "min_k": (0.0, 0.0), "top_k": (1000.0, 0.0), "top_n_sigma": (5.0, 0.0)}
    names = [name for name in RULES if name != "top_w"]
    return [
        replace(by_hand(logits, name, *values.get(name, (1e-6, 0.0)), temperature=2.0), uniform=uniform)
        for name in names
        for uniform in (0.2, 0.9999)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_list_with_all_finite_logits_proves_every_rule(form: str, tmp_path: Path) -> None:
    wanted = {1: CANDIDATES, 63: CANDIDATES, 64: LIST, 200: LIST, LIST - 1: LIST, LIST: WHOLE, LIST + 1: WHOLE}
    batches = [with_finite(number) for number in wanted]
    assert differences(form, [case for batch in batches for case in batch]) == []
    assert steps(form, batches, tmp_path) == list(wanted.values())


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_the_steps_that_other_rows_need(form: str) -> None:
    rng = np.random.default_rng(5)
    short, whole = by_hand(falling(), "top_k", 50), by_hand(falling(), "none")
    cases = [*PROVEN.values(), short, whole, *(random_case(rng, VOCAB) for _ in range(4))]
    cases = [replace(case, uniform=float(rng.random(dtype=np.float32))) for case in cases]
    cases.append(replace(short, rule_values=(-1.0, 0.0)))
    alone = [run(session(form), feeds([case])) for case in cases]
    order = rng.permutation(len(cases))
    together = run(session(form), feeds([cases[index] for index in order]))
    for name, values in together.items():
        assert np.array_equal(values, np.concatenate([alone[index][name] for index in order])), name


class Reversed(EagerOps):
    """Sorts equal numbers by descending index, as ONNX does not."""

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return _reversed_topk if op_type == "TopK" else super().__getattr__(op_type)


def _reversed_topk(values: Any, count: Any, axis: int, largest: int = 1, sorted: int = 1) -> tuple[Any, Any]:
    numbers = _array(values)
    signed = -numbers if largest else numbers
    width = numbers.shape[axis]
    order = width - 1 - np.argsort(np.flip(signed, axis), axis=axis, kind="stable")
    chosen = order[:, : int(_array(count).item())]
    return np.take_along_axis(numbers, chosen, axis), chosen


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.value if hasattr(tensor, "value") else tensor)


def test_portable_lists_do_not_depend_on_how_topk_orders_equal_logits() -> None:
    """Half-precision logits have many equal values, and providers' sorts may have no tie rule."""
    made, rounded = spec("portable"), np.round(falling() * 8) / 8  # about six tokens of each value
    cases = [
        by_hand(rounded, "top_k", 203), by_hand(rounded, "top_p", 0.93), by_hand(rounded, "top_h", 0.7, 100),
        by_hand(rounded, "min_p", 0.05), by_hand(rounded, "typical", 0.9),
    ]  # fmt: skip
    cases = [replace(case, uniform=uniform) for case in cases for uniform in (0.1, 0.55, 0.9)]
    given = feeds(cases)
    wide = np.pad(given["logits"], ((0, 0), (0, padded_width(VOCAB) - VOCAB)), constant_values=-np.inf)
    answers = []
    for op in (EagerOps(18), Reversed(18)):
        rows = row_parameters(op, [given[name] for name in PARAMETERS])
        rules = row_rules(op, made.rules, given["rule"], given["rule_values"], rows)
        found = row_statistics(op, wide, wide.max(axis=1, keepdims=True), rules, rows)
        answer, final = list_answer(op, made, wide, list_length(made), rules, found, rows)
        final = _array(final)[:, 0]
        assert final[:12].all()
        answers.append((_array(answer.columns)[final, :5], _array(answer.keep_mask)[final], final))
    for one, other in zip(*answers, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("form", "changes", "length"),
    [
        ("portable", {}, LIST),
        ("onnxruntime", {}, LIST),
        ("static", {}, 0),  # has no branches
        ("portable", {"vocab_size": 3840}, 0),  # sorted whole
        ("portable", {"vocab_size": 3841, "options": TopWOptions(top_m=5000, metric="uniform")}, 3840),
        ("onnxruntime", {"vocab_size": 9000, "options": TopWOptions(top_m=5000, metric="uniform")}, 3840),
        ("portable", {"options": TopWOptions(top_m=1200, metric="uniform")}, 1200),
        ("portable", {"options": TopWOptions(top_m=79, metric="uniform")}, 0),  # not longer than the candidates
        ("portable", {"options": TopWOptions(top_m=80, metric="uniform")}, 80),
    ],
)
def test_the_list_is_as_long_as_the_pool_where_it_is_useful(form: str, changes: dict[str, Any], length: int) -> None:
    assert list_length(spec(form, **changes)) == length
