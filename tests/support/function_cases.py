"""Compare random rows in the sampler's function with the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from tests.support.rows import (
    SINGLE,
    Case,
    Scenario,
    columns,
    differences,
    embedding_table,
    explanation,
    geometry_of,
    redrawn,
    reference,
    rules_of,
)
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import FLOAT32_TIES, Geometry, SampledRow, pack_mask, sample_row
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWOptions, TopWParameters
from topw_deploy.sampling.rules import RULES

FORMS = ("branches", "no-branches")
"""The function, with and without branches."""

NATIVE = "native"
"""A form beside FORMS: the native operator."""


def graph(
    scenario: Scenario, form: str, table: np.ndarray, geometry: Geometry, threads: int = 1, **changes: Any
) -> ort.InferenceSession:
    """A session of the sampler-only model; `form`: one of FORMS, or NATIVE; changes: of the spec.

    Omits `mass` for a large vocabulary of whole blocks, where it would disable the branch that skips edits.
    """
    changes = {
        "branches": form != "no-branches",
        "with_mass": not (scenario.vocab_size % 128 == 0 and scenario.vocab_size >= 8192),
        "with_keep_mask": True,
        **changes,
    }
    model = _model(scenario.options, scenario.vocab_size, table, geometry, **changes)
    return open_model(model, library_path() if form == NATIVE else None, threads)


def _model(
    options: TopWOptions, vocab_size: int, table: np.ndarray, geometry: Geometry, **changes: Any
) -> onnx.ModelProto:
    if options.metric == "uniform":
        spec = SamplerSpec(options=options, vocab_size=vocab_size, **changes)
        return ir.to_proto(sampler_model(spec, None, geometry))
    embedding = plain_gather(table.shape[0], table.shape[1], dtype=ir.tensor(table).dtype)
    spec = SamplerSpec(
        options=options, vocab_size=vocab_size, embedding=embedding, hidden_size=table.shape[1], **changes
    )
    return ir.to_proto(sampler_model(spec, table, geometry))


@cache
def opened(
    form: str, vocab: int, metric: str = "mahalanobis", top_m: int = 50, rules: tuple[str, ...] = tuple(RULES)
) -> tuple[Scenario, Geometry, ort.InferenceSession]:
    """A scenario with a plain table of 8 coordinates, its geometry, and a session of its graph."""
    scenario = Scenario(TopWOptions(top_m=top_m, metric=metric), vocab, 8, "plain", 0)
    table = embedding_table(scenario)
    geometry = geometry_of(scenario.options, table)
    return scenario, geometry, graph(scenario, form, table, geometry, rules=rules)


def by_hand(logits: object, rule: str, *values: float, **changes: float) -> Case:
    """A row with a rule, its values, and default parameters except for `changes`; the uniform number is 0."""
    v0, v1, *_ = (*values, 0.0, 0.0)
    parameters = {**asdict(TopWParameters()), **changes}
    return Case(np.array(logits, np.float32), parameters, 0.0, rule, RULES[rule].code, (v0, v1))


def feeds(cases: list[Case], edits: int = 0, words: int = 0) -> dict[str, np.ndarray]:
    """The graph's inputs. Each row has `edits` edits of padding and `words` words of a mask that allows everything."""
    batch = len(cases)
    rule, values = rules_of(cases)
    return {
        "logits": np.stack([case.logits for case in cases]),
        "edit_ids": np.full((batch, edits), -1, np.int64),
        "edit_penalty": np.ones((batch, edits), np.float32),
        "edit_bias": np.zeros((batch, edits), np.float32),
        "allowed": np.full((batch, words), -1, np.int32),
        "rule": rule,
        "rule_values": values,
        **columns(cases),
    }


def masked_feeds(cases: list[Case]) -> dict[str, np.ndarray]:
    """The inputs with edits of padding, and with a mask in place of the logits -inf, which become other numbers."""
    inputs = feeds(cases, edits=2)
    allowed = inputs["logits"] != -np.inf
    other = np.random.default_rng(0).choice(np.array([np.nan, np.inf, 300.0, 0.0], np.float32), allowed.shape)
    return inputs | {"logits": np.where(allowed, inputs["logits"], other), "allowed": pack_mask(allowed)}


def run(session: ort.InferenceSession, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@dataclass
class Tally:
    """Compared, certified and explained rows by regime."""

    rows: Counter[str] = field(default_factory=Counter)
    certified: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    def add(self, label: str, case: Case, wanted: SampledRow, found: Mapping[str, np.ndarray]) -> None:
        """Record one row's differences."""
        regime = case.regime.split(",")[0]
        self.rows[regime] += 1
        self.certified[regime] += wanted.certified
        for difference in differences(wanted, found, SINGLE):
            reason = explanation(difference, wanted)
            if reason is None:
                self.unexplained.append(f"{label}: {difference}; {case.regime}, {case.parameters}, {wanted.ties}, "
                                        f"wanted {_brief(asdict(wanted))}, found {_brief(found)}")  # fmt: skip
            else:
                self.explained[f"{difference}: {reason}"] += 1


def unexplained(
    label: str, scenario: Scenario, geometry: Geometry, cases: list[Case], answers: dict[str, np.ndarray]
) -> list[str]:
    """The differences between a batch's answers and the reference that no tie explains."""
    tally = Tally()
    for index, case in enumerate(cases):
        found = {name: value[index] for name, value in answers.items()}
        tally.add(label, case, reference(scenario.options, geometry, case), found)
    return tally.unexplained


def compare(scenario: Scenario, sessions: dict[str, ort.InferenceSession], geometry: Geometry, cases: list[Case],
            tallies: dict[str, Tally]) -> None:  # fmt: skip
    """Run each batch in every form, again with other uniform numbers, padded edits, and masks instead of -inf."""
    wanted = [reference(scenario.options, geometry, case) for case in cases]
    second = [redrawn(row, case, 1.0 - 2.0**-24 - case.uniform) for row, case in zip(wanted, cases, strict=True)]
    again = [case for _, case in second]
    both = (wanted, cases, feeds(cases)), ([row for row, _ in second], again, masked_feeds(again))
    for form, session in sessions.items():
        for rows, batch, inputs in both:
            results = run(session, inputs)
            for index, (row, case) in enumerate(zip(rows, batch, strict=True)):
                found = {name: value[index] for name, value in results.items()}
                tallies[form].add(f"{form} {scenario.name}/{scenario.table_kind}", case, row, found)


def compared(
    scenario: Scenario, geometry: Geometry, session: ort.InferenceSession, cases: list[Case], most: float = 1.0
) -> list[str]:
    """The differences of `compare` that no tie explains; ties may explain at most the share `most`."""
    tally = {"": Tally()}
    compare(scenario, {"": session}, geometry, cases, tally)
    assert sum(tally[""].explained.values()) <= most * 2 * len(cases)
    return tally[""].unexplained


def _brief(values: Mapping[str, object]) -> dict[str, object]:
    return {name: values[name] for name in ("next_token", "kept", "certified", "logprob")}


@dataclass(frozen=True)
class Wanted:
    """The options of a model.

    branches: whether the function has branches.
    mass, keep_mask: optional outputs.
    dtype: of the table.
    """

    options: TopWOptions = field(default_factory=lambda: TopWOptions(top_m=40, metric="cosine"))
    vocab_size: int = 300
    hidden_size: int = 8
    branches: bool = True
    mass: bool = False
    keep_mask: bool = False
    dtype: Any = np.float32

    @property
    def table(self) -> np.ndarray:
        scenario = Scenario(self.options, self.vocab_size, self.hidden_size, "clusters", 0)
        return embedding_table(scenario).astype(self.dtype)

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.options, self.table.astype(np.float32))

    def model(self) -> onnx.ModelProto:
        """A new model, which the caller may change."""
        changes = {"branches": self.branches, "with_mass": self.mass, "with_keep_mask": self.keep_mask}
        return _model(self.options, self.vocab_size, self.table, self.geometry, opset=18, **changes)


def open_model(model: onnx.ModelProto, native: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    """A CPU session over the function, or the operator of the library `native`."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if native is not None:
        options.register_custom_ops_library(str(native))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def node_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "TopWSample")


def set_attribute(model: onnx.ModelProto, name: str, value: Any) -> None:
    """Set an attribute of the sampler's node."""
    node = node_of(model)
    for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def clear_rows(wanted: Wanted, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """bool [batch]: rows that float32 rounding cannot change."""
    clear = []
    for index, logits in enumerate(inputs["logits"]):
        parameters = {name: float(inputs[name][index]) for name in PARAMETER_NAMES}
        uniform, words = float(inputs["uniform"][index]), inputs["allowed"][index]
        allowed = words if len(words) else None
        row = sample_row(
            logits, parameters, wanted.options, wanted.geometry, uniform, allowed=allowed,
            rule=int(inputs["rule"][index]), rule_values=inputs["rule_values"][index].tolist()
        )  # fmt: skip
        ties = row.ties.allow_other_set(FLOAT32_TIES) or row.ties.allow_other_certified(FLOAT32_TIES)
        clear.append(row.is_valid and not ties and row.draw_margin > FLOAT32_TIES.draw)
    return np.array(clear)
