"""/topw/inspect: how one token of an answer was chosen: what Top-W kept, and what other rules would have kept.

The kept sets are those of `topw_deploy.sampling`, in float64. The engine computes the step's logits again, in a run of
another shape, so they may differ from the logits of the answer by float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from anyio import CapacityLimiter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import LogitsError, ManifestError
from topw_deploy.runtime.inputs import edited_logits
from topw_deploy.runtime.logprobs import Logits
from topw_deploy.runtime.loop import gives_logits
from topw_deploy.runtime.rule_settings import read_rules
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.sampling import (
    Geometry,
    RuleParameters,
    TopWOptions,
    TopWParameters,
    as_float32,
    crop,
    draw,
    uniform_for,
)
from topw_deploy.sampling.parameters import GREEDY_BELOW
from topw_deploy.sampling.rules import TOP_W, kept_set
from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.schemas import InspectRequest
from topw_deploy.serve.service import Served
from topw_deploy.serve.stream import Run, read_body

_WITHOUT_EFFECT = frozenset(
    {
        *("num_return_sequences", "skip_special_tokens", "add_special_tokens", "logprobs", "prompt_logprobs"),
        *("max_new_tokens", "max_length"),
    }
)


class Inspector:
    """Explains steps of one model, one at a time.

    limiter: of the one thread that explains.
    """

    def __init__(self, served: Served) -> None:
        self._model = served.model
        self.limiter = CapacityLimiter(1)

    @cached_property
    def _geometry(self) -> tuple[Geometry | None, str | None]:
        """Returns (the model's geometry, None), or (None, the reason why it cannot be read)."""
        try:
            return read_geometry(self._model.path, self._model.manifest), None
        except ManifestError as error:
            return None, str(error)

    def explain(self, step: InspectedStep, logits: Logits) -> dict[str, Any]:
        """The explanation as JSON. Takes about as long as sorting the logits.

        logits: of the step, float32 [V].
        """
        model = self._model
        geometry, why_none = self._geometry
        options = model.manifest.sampler.options
        return StepExplanation(step, logits, options, geometry, model.tokenizer.text_of, why_none).as_dict()


_inspectors: WeakKeyDictionary[Served, Inspector] = WeakKeyDictionary()


async def inspect(request: Request) -> Response:
    """Recompute the step that drew a token, and explain its kept sets."""
    body = await read_body(request, InspectRequest)
    run = Run(request, body, "inspect", "prompt_token_ids")
    served = run.served
    with run.naming_fields():
        step = _inspected_step(body, served)
    if not gives_logits(served.model.manifest):
        raise invalid_request(
            f"{served.name} was exported without logits, so no step can be recomputed; export it again with "
            "--with-logits.",
            code="no_logits",
            status=422,
        )
    inspector = _inspectors.setdefault(served, Inspector(served))
    logits = await run.logits([*step.request.prompt, *step.drawn])
    answer = await run.prepare(lambda: inspector.explain(step, logits), inspector.limiter)
    if answer["distances_unavailable"]:
        answer["distances_unavailable"] = served.without_path(answer["distances_unavailable"])
    return JSONResponse({"model": served.name, **answer})


def _inspected_step(body: InspectRequest, served: Served) -> InspectedStep:
    """Find the step in the request. Raises RequestError, ParameterError and PromptError if it cannot be recomputed."""
    parameters = {name: value for name, value in body.parameters().items() if name not in _WITHOUT_EFFECT}
    if body.position >= len(body.token_ids):
        raise invalid_request(
            f"position is {body.position}, but token_ids has {len(body.token_ids)} tokens; count from 0.", "position"
        )
    drawn = body.token_ids[: body.position]
    vocab = served.model.manifest.sampler.vocab_size
    unknown = next((token for token in body.token_ids if token >= vocab), None)
    if unknown is not None:
        raise invalid_request(f"token_ids has {unknown}, but ids go from 0 to {vocab - 1}.", "token_ids")
    served.check_length([*body.prompt_token_ids, *drawn])
    request = served.resolve(body.prompt_token_ids, {**parameters, "max_new_tokens": 1})
    token = body.token_ids[body.position]
    return InspectedStep(request, body.sample, tuple(drawn), token, has_seed="seed" in parameters)


MOST_SHOWN = 60
"""Number of tokens that an inspection describes. It only counts the others."""

MOST_MOVED = 12
"""Number of tokens added or dropped by distances that are shown even if likelier tokens are not; half of it each."""

COMPARED_RULES = tuple(read_rules("top_p,min_p,top_h"))
"""The rules that an inspection compares with Top-W, at their usual settings."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class InspectedStep:
    """The step to explain.

    request: the sequence, not started.
    sample: the number of the sample that it was.
    drawn: tokens drawn before the step.
    token: the token that the step drew.
    has_seed: whether the request stated its seed, without which the draw cannot be repeated.
    """

    request: GeneratedSequence
    sample: int
    drawn: Sequence[int]
    token: int
    has_seed: bool

    @property
    def position(self) -> int:
        """Number of tokens before the drawn one, in prompt and answer."""
        return len(self.request.prompt) + len(self.drawn)


@dataclass(frozen=True)
class KeptSet:
    """The tokens that a rule keeps.

    name: key of the set in the answer; "chosen" for the set of the request's rule, unless that is Top-W.
    label: the rule and its parameters, for people.
    ids: int64 [n], by (logit descending, id ascending).
    certified: whether no distance can change the set; False for other rules than Top-W.
    """

    name: str
    label: str
    ids: Ids
    certified: bool = False


@dataclass
class StepExplanation:
    """The kept sets of a step.

    logits: of the step, float32 [V].
    geometry: None if distances cannot be read.
    text_of: returns the text of a token id.
    why_no_geometry: the reason why distances cannot be read; None if they can.
    sets: the kept sets, in the order of the answer.

    Raises LogitsError for logits from which no token can be drawn.
    """

    step: InspectedStep
    logits: Logits
    options: TopWOptions
    geometry: Geometry | None
    text_of: Callable[[int], str]
    why_no_geometry: str | None = None
    sets: list[KeptSet] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = as_float32(self.step.request.params.top_w)
        self.row = edited_logits(self.logits, self.step.request, self.step.drawn)
        if not np.isfinite(self.row.max()) or np.isnan(self.row).any():
            raise LogitsError("the logits of this step contain NaN or +infinity, or none is finite.")
        self.order: Ids = np.argsort(-self.row, kind="stable")
        self.probability = _softmax(self.row, self.parameters.temperature)
        self._add_top_w()
        for setting in COMPARED_RULES:
            rule = RuleParameters(**setting.parameters)
            self.sets.append(KeptSet(rule.chosen.name, setting.label, self._kept_by(rule)))
        chosen = self.step.request.params.rule
        if chosen.chosen is not TOP_W:
            self.sets.insert(0, KeptSet("chosen", chosen.chosen.name, self._kept_by(chosen)))

    def _add_top_w(self) -> None:
        """Add the set of Top-W, unless it needs distances that cannot be read, and the set without distances."""
        plain = replace(self.parameters, geom_scale=0.0)
        uniform = replace(self.options, metric="uniform", potential="nearest")
        base = crop(self.row, plain, uniform, Geometry.uniform())  # needs no distances
        found = base if self._is_certified(base.certified) else None
        if found is None and self.geometry is not None:
            found = crop(self.row, self.parameters, self.options, self.geometry)
        if found is not None:
            self.sets.append(KeptSet("top_w", "Top-W", found.kept, found.certified))
        self.sets.append(KeptSet("without_distances", "Top-W without distances", base.kept))

    def _is_certified(self, certified_without_distances: bool) -> bool:
        """Whether no distance can change the set (docs/contract/graph.md, section 4)."""
        return certified_without_distances and (self.parameters.geom_scale >= 0 or self.parameters.greedy)

    def _kept_by(self, rule: RuleParameters) -> Ids:
        parameters = self.parameters
        return kept_set(
            self.row,
            rule.chosen,
            rule.values,
            temperature=parameters.temperature,
            selection_temperature=parameters.selection_temperature,
        ).kept

    @property
    def drawn_from(self) -> KeptSet | None:
        """The set that the token was drawn from; None if it is unknown."""
        wanted = "top_w" if self.step.request.params.rule.chosen is TOP_W else "chosen"
        return next((each for each in self.sets if each.name == wanted), None)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as the JSON of /topw/inspect."""
        by_name = {each.name: each for each in self.sets}
        top_w, base = by_name.get("top_w"), by_name["without_distances"]
        added, dropped = self._tokens_moved(top_w, base)
        kept = self.drawn_from
        shown = self._tokens_shown([added, dropped])
        return {
            "object": "topw.inspection",
            "position": self.step.position,
            "rule": self.step.request.params.rule.chosen.name,
            "parameters": asdict(self.parameters),
            "metric": self.options.metric,
            "distances_unavailable": self.why_no_geometry,
            "token": self._drawn_token_as_dict(kept),
            "certified": None if top_w is None else top_w.certified,
            "added": len(added),
            "dropped": len(dropped),
            "sets": [self._set_as_dict(each) for each in self.sets],
            "tokens": self._tokens_as_dicts(shown, kept, {"added": added, "dropped": dropped}),
            "rest": {"tokens": len(self.row) - len(shown), "probability": _short(1 - self.probability[shown].sum())},
            "plane": self._map_as_dict(
                shown, [each for each in (kept, top_w, base) if each is not None], [added, dropped]
            ),
        }

    def _tokens_moved(self, top_w: KeptSet | None, base: KeptSet) -> tuple[Ids, Ids]:
        """Returns (tokens that distances added, tokens that distances dropped), each by descending logit."""
        if top_w is None:
            none = np.zeros(0, np.int64)
            return none, none
        return top_w.ids[~np.isin(top_w.ids, base.ids)], base.ids[~np.isin(base.ids, top_w.ids)]

    def _tokens_shown(self, moved: Sequence[Ids]) -> Ids:
        """The drawn token, some tokens that distances moved, and the likeliest others, by descending logit."""
        first = np.concatenate([[self.step.token], *(ids[: MOST_MOVED // 2] for ids in moved)]).astype(np.int64)
        others = self.order[: MOST_SHOWN + len(first)]
        wanted = np.concatenate([np.unique(first), others[~np.isin(others, first)]])[:MOST_SHOWN]
        return self.order[np.isin(self.order, wanted)]

    def _drawn_token_as_dict(self, kept: KeptSet | None) -> dict[str, Any]:
        """The token of the answer, and the token that the recomputed step draws if the request stated its seed."""
        token, request = self.step.token, self.step.request
        found: dict[str, Any] = {
            "id": token,
            "text": self.text_of(token),
            "rank": int(np.flatnonzero(self.order == token)[0]) + 1,
            "probability": _short(self.probability[token]),
            "kept": None if kept is None else bool(np.isin(token, kept.ids)),
            "redrawn": None,
            "uniform": None,
        }
        if self.step.has_seed and kept is not None:
            u = uniform_for(request.params.seed, self.step.position, self.step.sample)
            found["uniform"] = u
            greedy = self.parameters.greedy
            found["redrawn"] = int(
                kept.ids[0] if greedy else draw(self.row, kept.ids, self.parameters.temperature, u).token
            )
        return found

    def _set_as_dict(self, one: KeptSet) -> dict[str, Any]:
        return {
            "name": one.name,
            "label": one.label,
            "kept": len(one.ids),
            "certified": one.certified if one.name == "top_w" else None,
            "probability": _short(self.probability[one.ids].sum()),
        }

    def _tokens_as_dicts(self, shown: Ids, kept: KeptSet | None, moved: dict[str, Ids]) -> list[dict[str, Any]]:
        inside = {each.name: np.isin(shown, each.ids) for each in self.sets}
        weight = np.zeros(len(self.row)) if kept is None else _draw_probability(self.row, kept.ids, self.parameters)
        nearest = self._nearest_distances(shown, kept)
        changes = {name: set(ids.tolist()) for name, ids in moved.items()}
        return [
            {
                "id": token,
                "text": self.text_of(token),
                "probability": _short(self.probability[token]),
                "drawn_with": _short(weight[token]),
                "sets": [name for name, held in inside.items() if held[place]],
                "change": next((name for name, ids in changes.items() if token in ids), None),
                "distance": None if nearest is None else _short(nearest[place]),
            }
            for place, token in enumerate(shown.tolist())
        ]

    def _nearest_distances(self, shown: Ids, kept: KeptSet | None) -> Floats | None:
        """The distance of each token to the nearest other kept token [n]; None without distances or such a token."""
        if self.geometry is None or kept is None or len(kept.ids) < 2:
            return None
        members = kept.ids[: self.options.top_m]
        distances = self.geometry.distances(shown, members)
        distances[shown[:, None] == members] = np.inf
        return np.asarray(distances.min(axis=1))

    def _map_as_dict(self, shown: Ids, sets: Sequence[KeptSet], moved: Sequence[Ids]) -> dict[str, Any] | None:
        """The map of the tokens in `sets` and of the drawn one; None if distances are all equal or unknown.

        moved: tokens that distances added or dropped; some of them are always on the map.
        """
        if self.geometry is None or self.options.metric == "uniform":
            return None
        inside = np.any([np.isin(shown, each.ids) for each in sets], axis=0) | (shown == self.step.token)
        ids = shown[inside]
        always = [self.step.token, *(token for each in moved for token in each[: MOST_MOVED // 2])]
        found = map_tokens(self.geometry, ids, np.isin(ids, always))
        if found is None:
            return None
        return {
            "share": _short(found.share),
            "points": [
                {"id": token, "x": _short(x), "y": _short(y)}
                for token, (x, y) in zip(found.ids.tolist(), found.points.tolist(), strict=True)
            ],
        }


def _softmax(row: Logits, temperature: float) -> Floats:
    """Probabilities [V] at the temperature; at 1 for a greedy row."""
    scaled = row.astype(np.float64) - row.max()
    weights: Floats = np.exp(scaled / (1.0 if temperature < GREEDY_BELOW else temperature))
    return weights / weights.sum()


def _draw_probability(row: Logits, ids: Ids, parameters: TopWParameters) -> Floats:
    """Probability of each token [V] in a draw from the kept set `ids`."""
    found = np.zeros(len(row))
    if parameters.greedy:
        found[ids[0]] = 1.0
    else:
        found[ids] = _softmax(row[ids], parameters.temperature)
    return found


def _short(value: float) -> float:
    """`value` with 6 significant digits, to shorten the JSON."""
    return float(f"{value:.6g}")


MOST_POINTS = 40


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Tokens in a plane.

    ids: the tokens, int64 [n].
    points: their places, float64 [n, 2].
    share: part of the points' spread (sum of squared distances from their centre) that the plane shows, from 0 to 1;
        0 if the spread is 0.
    """

    ids: Ids
    points: Floats
    share: float


def map_tokens(geometry: Geometry, ids: Ids, preferred: NDArray[np.bool_]) -> TokenMap | None:
    """Place at most MOST_POINTS of the tokens `ids` [n] in a plane, in their order; None for fewer than three tokens.

    preferred: [n], the tokens that are chosen first; the others are chosen in their order.
    """
    if len(ids) < 3:
        return None
    chosen = np.sort(np.argsort(~preferred, kind="stable")[:MOST_POINTS])
    points, share = place_in_plane(geometry.distances(ids[chosen], ids[chosen]))
    return TokenMap(ids[chosen], points, share)


def place_in_plane(distances: Floats) -> tuple[Floats, float]:
    """Classical multidimensional scaling to a plane (Torgerson 1952).

    distances: [n, n], symmetric with a zero diagonal.

    Returns (points [n, 2] whose distances are close to `distances`, the share as in TokenMap).

    The points are the first two eigenvectors of -1/2 C D^2 C, where C is the centring matrix, scaled by the roots of
    their eigenvalues. Negative eigenvalues, which occur if the distances are not Euclidean, count as 0. Each axis
    points to the side of its largest coordinate, so that equal distances give equal points.
    """
    n = len(distances)
    squares = np.square(distances)
    centred = -0.5 * (squares - squares.mean(axis=0) - squares.mean(axis=1)[:, None] + squares.mean())
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    points = np.zeros((n, 2))
    for axis in range(min(2, n)):
        column = vectors[:, axis] * np.sqrt(values[axis])
        largest = column[np.argmax(np.abs(column))]
        points[:, axis] = -column if largest < 0 else column
    total = float(values.sum())
    return points, float(values[:2].sum() / total) if total > 0 else 0.0
