"""The shipped sampler against the reference algorithm, on the model's own logits and its own table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graft.embedding_node import find_embedding
from topw_deploy.export.graft.table import EmbeddingTable
from topw_deploy.export.verification.probe import SamplerProbe
from topw_deploy.export.write.weights import MODEL_FILE
from topw_deploy.manifest import Check, SamplerInfo
from topw_deploy.sampling import FLOAT32_TIES, Geometry, Row, TopWOptions, TopWParameters, draw, sample_row

LOGPROB_BOUND = 1e-4
_LARGEST_CROP_WALKED = 6  # every token of a crop up to this size is drawn once, so many of a larger one
_LARGEST_BATCH = 32
_POOL_VALUES = 8_000_000  # features of one batch's pools, of which the graph holds several copies of 4 bytes each


def _settings(sampler: SamplerInfo) -> tuple[dict[str, float], ...]:
    """Beside the export's own defaults: settings under which distances decide, a hot one, a cold one, and greedy.

    A distance only changes a crop where it is of the size of differences between scores, about 1. The metrics but
    `mahalanobis` are; its distances are near sqrt(2 hidden).
    """
    one = (2.0 * (sampler.hidden_size or 1)) ** -0.5 if sampler.options.metric == "mahalanobis" else 1.0
    return (
        {"lam": 0.5, "beta": 1.0, "temperature": 1.0, "init_top_p": 0.3, "geom_scale": 0.5 * one},
        {"lam": 1.0, "beta": 3.0, "temperature": 1.0, "init_top_p": 0.3, "geom_scale": 0.25 * one},
        {"lam": 1.0, "beta": 3.0, "temperature": 1.3, "init_top_p": 0.1, "geom_scale": one},
        {"lam": 1.8, "beta": 3.2, "temperature": 1.5, "init_top_p": 0.4, "geom_scale": -0.1 * one},
        {"temperature": 0.7, "selection_temperature": 1.3},
        {"temperature": 0.0},
    )


def graph_geometry(folder: Path, options: TopWOptions, vocab: int) -> Geometry:
    """The reference's geometry over the table in the exported graph, statistics taken anew in float64."""
    if options.metric == "uniform":
        return Geometry.uniform()
    model = ir.load(folder / MODEL_FILE)
    return Geometry.from_embeddings(EmbeddingTable(find_embedding(model.graph), vocab), options.metric)


def sampler_checks(
    probe: SamplerProbe,
    sampler: SamplerInfo,
    defaults: TopWParameters,
    geometry: Geometry,
    logits: np.ndarray,
    title: str = "sampler",
) -> Iterator[Check]:
    """Kept sets, tokens, certificates and log-probabilities on `logits` [n, vocab]; `title` begins their names.

    A crop is compared by its size and by drawing every one of its tokens (six of a large one), each with
    the uniform number in the middle of its interval. Differences that rounding may cause (docs/contract/graph.md,
    section 4) are counted, not failed.
    """
    wrong = {"kept sets": 0, "tokens": 0, "certificates": 0}
    ties = uncertified = rows = 0
    worst = 0.0
    for wanted, found in _rows(probe, sampler, defaults, geometry, logits):
        rows += 1
        uncertified += not wanted.certified
        if wanted.ties.allow(FLOAT32_TIES):
            ties += 1
            continue
        wrong["kept sets"] += found["kept"] != wanted.kept
        # The graph's own slack is towards "not certified", which costs time and changes nothing.
        false_claim = bool(found["certified"]) and not wanted.certified
        wrong["certificates"] += false_claim and not wanted.ties.allow_certified(FLOAT32_TIES)
        if wanted.draw_margin <= FLOAT32_TIES.draw:
            ties += 1
            continue
        wrong["tokens"] += found["next_token"] != wanted.next_token
        if found["next_token"] == wanted.next_token:
            worst = max(worst, abs(float(found["logprob"]) - wanted.logprob))
    detail = f"{rows} rows, {uncertified} decided by geometry, {ties} on a tie"
    for name, count in wrong.items():
        yield Check(f"{title} {name}", bool(count == 0), float(count), 0.0, detail)
    yield Check(f"{title} log-probabilities", worst <= LOGPROB_BOUND, worst, LOGPROB_BOUND, detail)


def _rows(
    probe: SamplerProbe, sampler: SamplerInfo, defaults: TopWParameters, geometry: Geometry, logits: np.ndarray
) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
    """The reference's answer and the graph's for every logits row, setting and uniform number."""
    cases: list[tuple[int, TopWParameters, float, Row]] = []
    for setting in ({}, *_settings(sampler)):
        parameters = TopWParameters(**{**asdict(defaults), **setting})
        for index, row in enumerate(logits):
            first = sample_row(row, parameters, sampler.options, geometry, 0.5)
            for uniform in _uniforms(row, first, parameters):
                cases.append((index, parameters, uniform, _drawn_with(first, row, parameters, uniform)))
    row_values = min(sampler.options.top_m, sampler.vocab_size) * (sampler.hidden_size or 1)
    batch = max(1, min(_LARGEST_BATCH, _POOL_VALUES // row_values))
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        results = probe.run(
            logits[[index for index, *_ in part]], [asdict(p) for _, p, _, _ in part], [u for _, _, u, _ in part]
        )
        for number, (*_, wanted) in enumerate(part):
            yield wanted, {name: value[number] for name, value in results.items()}


def _drawn_with(row: Row, logits: np.ndarray, parameters: TopWParameters, uniform: float) -> Row:
    """The answer `row` with another uniform number: the crop does not depend on it."""
    if parameters.greedy or not row.valid:
        return row
    drawn = draw(logits, row.kept_ids, float(np.float32(parameters.temperature)), float(np.float32(uniform)))
    return replace(row, next_token=drawn.token, logprob=drawn.logprob, draw_margin=drawn.margin)


def _uniforms(logits: np.ndarray, row: Row, parameters: TopWParameters) -> list[float]:
    """A uniform number in the middle of each kept token's interval, so that drawing with them spells the crop out."""
    if parameters.greedy or not row.valid:
        return [0.5]
    kept = logits[row.kept_ids].astype(np.float64)
    edges = np.concatenate([[0.0], np.cumsum(np.exp((kept - kept[0]) / parameters.temperature))])
    middles = (edges[:-1] + edges[1:]) / 2 / edges[-1]
    wide = np.diff(edges) / edges[-1] > 1e-5  # narrower ones are within rounding of their neighbours
    middles = middles[wide]
    if len(middles) == 0:
        return [0.5]
    walked = np.unique(np.linspace(0, len(middles) - 1, _LARGEST_CROP_WALKED).astype(int))
    return [float(middles[i]) for i in walked]
