"""/topw/inspect: how one token of an answer was chosen: what Top-W kept, and what other rules would have kept.

The kept sets are those of `topw_deploy.sampling`, in float64. The engine computes the step's logits again, in a run of
another shape, so they may differ from the logits of the answer by float32 rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import LogitsError
from topw_deploy.runtime.inputs import edited_logits
from topw_deploy.runtime.loop import gives_logits
from topw_deploy.runtime.parameters import read_values
from topw_deploy.runtime.results import Logits
from topw_deploy.runtime.rule_settings import read_rules
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.sampling import Geometry, RuleParameters, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import GREEDY_BELOW
from topw_deploy.sampling.rules import TOP_W, kept_set
from topw_deploy.serve.failures import RequestError
from topw_deploy.serve.schemas import InspectRequest
from topw_deploy.serve.service import Served
from topw_deploy.serve.stream import Run, cancel_on_disconnect, read_body

MOST_SHOWN = 60
"""Number of tokens that an inspection describes. It only counts the others."""

MOST_MOVED = 12
"""Number of tokens added or dropped by distances that are shown even if likelier tokens are not; half of it each."""

MOST_POINTS = 40
"""Number of tokens on the map."""

COMPARED_RULES = tuple(read_rules("top_p,min_p,top_h"))
"""The rules that an inspection compares with Top-W, at their usual settings."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
_WITHOUT_EFFECT = frozenset(
    {
        *("num_return_sequences", "skip_special_tokens", "add_special_tokens", "logprobs", "prompt_logprobs"),
        *("max_new_tokens", "max_length"),
    }
)


async def inspect(request: Request) -> Response:
    """Recompute the step that drew a token, and explain its kept sets."""
    body = await read_body(request, InspectRequest)
    run = Run(request, body, "inspect", "prompt_token_ids")
    served = run.served
    sequence = await run.prepare(lambda: _sequence(body, served))
    if not gives_logits(served.model.manifest):
        raise RequestError(
            f"{served.name} was exported without logits, so no step can be recomputed; export it again with "
            "--with-logits.",
            code="no_logits",
            status=422,
        )
    drawn, token = body.token_ids[: body.position], body.token_ids[body.position]
    computed = served.engine.logits_after([*sequence.prompt, *drawn], run.options.request_timeout)
    logits = await cancel_on_disconnect(request, computed)
    return JSONResponse(await run.prepare(lambda: explain(served, sequence, drawn, token, logits)))


def _sequence(body: InspectRequest, served: Served) -> Sequence:
    """The sequence with the step. Raises RequestError, ParameterError and PromptError if it cannot be recomputed."""
    given = body.parameters()
    read_values({name: value for name, value in given.items() if name in _WITHOUT_EFFECT})
    parameters = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    if body.position >= len(body.token_ids):
        raise RequestError(
            f"position is {body.position}, but token_ids has {len(body.token_ids)} tokens; count from 0.", "position"
        )
    vocab = served.model.manifest.sampler.vocab_size
    unknown = next((token for token in body.token_ids if token >= vocab), None)
    if unknown is not None:
        raise RequestError(f"token_ids has {unknown}, but ids go from 0 to {vocab - 1}.", "token_ids")
    return served.sequences(body.prompt_token_ids, {**parameters, "max_new_tokens": 1})[0]


def explain(served: Served, sequence: Sequence, drawn: list[int], token: int, logits: Logits) -> dict[str, Any]:
    """The explanation of a step, as JSON. Takes about as long as sorting the logits.

    drawn: tokens drawn before the step.
    token: the token that the step drew.
    logits: of the step, float32 [V].

    Raises LogitsError for logits from which no token can be drawn.
    """
    logits = edited_logits(logits, sequence, drawn)
    if not np.isfinite(logits.max()) or np.isnan(logits).any():
        raise LogitsError("the logits of this step contain NaN or +infinity, or none is finite.")
    parameters, options = as_float32(sequence.params.top_w), served.model.manifest.sampler.options
    (geometry, why_none), rule = served.geometry, sequence.params.rule.chosen
    order: Ids = np.argsort(-logits, kind="stable")
    probability = _softmax(logits, parameters.temperature)
    sets, certified = _kept_sets(logits, sequence, parameters, served)
    base = sets["without_distances"][1]
    top_w = sets["top_w"][1] if "top_w" in sets else base
    _, kept = sets.get("top_w" if rule is TOP_W else "chosen", ("", None))  # the set that the token was drawn from
    added, dropped = top_w[~np.isin(top_w, base)], base[~np.isin(base, top_w)]
    moved = [*added[: MOST_MOVED // 2], *dropped[: MOST_MOVED // 2]]
    shown = np.array(list(dict.fromkeys([token, *moved, *order[: MOST_SHOWN + MOST_MOVED]]))[:MOST_SHOWN])
    shown = order[np.isin(order, shown)]

    distance: Floats | None = None  # to the nearest other kept token
    if geometry is not None and kept is not None and len(kept) >= 2:
        members = kept[: options.top_m]
        distances = geometry.distances(shown, members)
        distances[shown[:, None] == members] = np.inf
        distance = distances.min(axis=1)
    plane = None
    if geometry is not None and options.metric != "uniform":
        on_map = np.isin(shown, [token, *(each for ids in (kept, top_w, base) if ids is not None for each in ids)])
        plane = _plane(geometry, shown[on_map], np.isin(shown[on_map], [token, *moved]))
    chance = np.zeros(len(logits))  # of each token in the draw
    if kept is not None and parameters.greedy:
        chance[kept[0]] = 1.0
    elif kept is not None:
        chance[kept] = _softmax(logits[kept], parameters.temperature)
    text_of = served.model.tokenizer.text_of
    return {
        "object": "topw.inspection",
        "model": served.name,
        "rule": rule.name,
        "metric": options.metric,
        "distances_unavailable": why_none,
        "token": {
            "id": token,
            "text": text_of(token),
            "rank": int(np.flatnonzero(order == token)[0]) + 1,
            "probability": _short(probability[token]),
            "kept": None if kept is None else bool(np.isin(token, kept)),
        },
        "certified": certified,
        "added": len(added),
        "dropped": len(dropped),
        "sets": [
            {"name": name, "label": label, "kept": len(ids), "probability": _short(probability[ids].sum())}
            for name, (label, ids) in sets.items()
        ],
        "tokens": [
            {
                "id": each,
                "text": text_of(each),
                "probability": _short(probability[each]),
                "drawn_with": _short(chance[each]),
                "sets": [name for name, (_, ids) in sets.items() if each in ids],
                "change": "added" if each in added else "dropped" if each in dropped else None,
                "distance": None if distance is None else _short(distance[place]),
            }
            for place, each in enumerate(shown.tolist())
        ],
        "rest": {"tokens": len(logits) - len(shown), "probability": _short(1 - probability[shown].sum())},
        "plane": plane,
    }


def _kept_sets(
    logits: Logits, sequence: Sequence, parameters: TopWParameters, served: Served
) -> tuple[dict[str, tuple[str, Ids]], bool | None]:
    """The kept sets of a step, and whether Top-W's is certified; None if its distances cannot be read.

    Of each set: name -> (the rule for people, ids int64 [n] by logit). The names are "chosen" for the request's rule
    unless that is Top-W, "top_w" unless its distances cannot be read, "without_distances", and the compared rules.
    """

    def kept_by(rule: RuleParameters) -> Ids:
        hot, selection = parameters.temperature, parameters.selection_temperature
        return kept_set(logits, rule.chosen, rule.values, temperature=hot, selection_temperature=selection).kept

    options, (geometry, _) = served.model.manifest.sampler.options, served.geometry
    chosen = sequence.params.rule
    sets = {} if chosen.chosen is TOP_W else {"chosen": (chosen.chosen.name, kept_by(chosen))}
    uniform = replace(options, metric="uniform", potential="nearest")
    base = crop(logits, replace(parameters, geom_scale=0.0), uniform, Geometry.uniform())  # needs no distances
    # No distance can change a certified set (docs/contract/graph.md, section 4).
    found = base if base.certified and (parameters.geom_scale >= 0 or parameters.greedy) else None
    if found is None and geometry is not None:
        found = crop(logits, parameters, options, geometry)
    if found is not None:
        sets["top_w"] = "Top-W", found.kept
    sets["without_distances"] = "Top-W without distances", base.kept
    for setting in COMPARED_RULES:
        rule = RuleParameters(**setting.parameters)
        sets[rule.chosen.name] = setting.label, kept_by(rule)
    return sets, None if found is None else found.certified


def _softmax(logits: Logits, temperature: float) -> Floats:
    """Probabilities [n] at the temperature; at 1 for a greedy step."""
    scaled = logits.astype(np.float64) - logits.max()
    weights: Floats = np.exp(scaled / (1.0 if temperature < GREEDY_BELOW else temperature))
    return weights / weights.sum()


def _short(value: float) -> float:
    """`value` with 6 significant digits, to shorten the JSON."""
    return float(f"{value:.6g}")


def _plane(geometry: Geometry, ids: Ids, preferred: NDArray[np.bool_]) -> dict[str, Any] | None:
    """The map of at most MOST_POINTS of the tokens `ids` [n], in their order; None for fewer than three tokens.

    preferred: [n], the tokens that are chosen first; the others are chosen in their order.
    """
    if len(ids) < 3:
        return None
    ids = ids[np.sort(np.argsort(~preferred, kind="stable")[:MOST_POINTS])]
    points, share = place_in_plane(geometry.distances(ids, ids))
    placed = zip(ids.tolist(), points.tolist(), strict=True)
    return {
        "share": _short(share),
        "points": [{"id": token, "x": _short(x), "y": _short(y)} for token, (x, y) in placed],
    }


def place_in_plane(distances: Floats) -> tuple[Floats, float]:
    """Classical multidimensional scaling to a plane (Torgerson 1952).

    distances: [n, n], symmetric with a zero diagonal.

    Returns (points [n, 2] whose distances are close to `distances`, the part of the points' spread that the plane
    shows: sums of squared distances from their centre; 0 if the spread is 0).

    The points are the first two eigenvectors of -1/2 C D^2 C, where C is the centring matrix, scaled by the roots of
    their eigenvalues. Negative eigenvalues, which occur if the distances are not Euclidean, count as 0. Each axis
    points to the side of its largest coordinate, so that equal distances give equal points.
    """
    squares = np.square(distances)
    centred = -0.5 * (squares - squares.mean(axis=0) - squares.mean(axis=1)[:, None] + squares.mean())
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    values = np.maximum(values[::-1], 0.0)
    points = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    points = points * np.where(np.take_along_axis(points, np.abs(points).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    total = float(values.sum())
    return points, float(values[:2].sum() / total) if total > 0 else 0.0
