"""Explains one step: which tokens Top-W kept, and which ones other rules would have kept.

The kept sets are those of `topw_deploy.sampling`, in float64. The engine computes the logits again from the states in
its cache, in a run of another shape, so they may differ from those of the stream by float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import LogitsError
from topw_deploy.runtime.edits import edited_logits
from topw_deploy.runtime.logprobs import Logits
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.rule_settings import read_rules
from topw_deploy.sampling import (
    GREEDY_BELOW,
    Geometry,
    RuleParameters,
    TopWOptions,
    TopWParameters,
    as_float32,
    draw,
    fast_crop,
    uniform_for,
)
from topw_deploy.sampling.rules import TOP_W, kept_set
from topw_deploy.serve.plane import in_plane

SHOWN = 60
"""Number of tokens that an inspection describes; it only counts the others."""

MOVED = 12
"""Up to this many tokens that distances added or dropped are shown, even if more likely ones are not."""

PLACED = 40
"""Maximum number of tokens in the plane of distances."""

COMPARED = tuple(read_rules("top_p,min_p,top_h"))
"""The other rules, at their usual settings."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """What to explain.

    request: resolved. drawn: tokens before the step. token: the one that was drawn.
    seeded: whether the request had a seed, without which the draw cannot be repeated.
    """

    request: RowRequest
    drawn: Sequence[int]
    token: int
    seeded: bool

    @property
    def position(self) -> int:
        """Number of tokens before it."""
        return len(self.request.prompt) + len(self.drawn)


@dataclass(frozen=True)
class KeptSet:
    """A rule's kept set. ids: by (logit descending, id ascending)."""

    name: str
    label: str
    ids: Ids
    certified: bool = False


@dataclass
class Explained:
    """An explained step. geometry: None if distances cannot be read; `why` is then the reason."""

    step: Step
    logits: Logits
    options: TopWOptions
    geometry: Geometry | None
    text_of: Callable[[int], str]
    why: str | None = None
    sets: list[KeptSet] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = as_float32(self.step.request.top_w)
        self.row = edited_logits(self.logits, self.step.request, self.step.drawn)
        if not np.isfinite(self.row.max()) or np.isnan(self.row).any():
            raise LogitsError("the logits of this step contain NaN or +infinity, or none is finite.")
        self.order: Ids = np.argsort(-self.row, kind="stable")
        self.probability = _softmax(self.row, self.parameters.temperature)
        self._top_w()
        for setting in COMPARED:
            rule = RuleParameters(**setting.parameters)
            self.sets.append(KeptSet(rule.chosen.name, setting.label, self._kept(rule)))
        chosen = self.step.request.rule
        if chosen.chosen is not TOP_W:
            self.sets.insert(0, KeptSet("chosen", chosen.chosen.name, self._kept(chosen)))

    def _top_w(self) -> None:
        """Add the set of Top-W, unless it needs distances that cannot be read, and the set without distances."""
        plain = replace(self.parameters, geom_scale=0.0)
        uniform = replace(self.options, metric="uniform", potential="nearest")
        base = fast_crop(self.row, plain, uniform, Geometry.uniform())  # which takes no distance
        found = base if self._is_certified(base.certified) else None
        if found is None and self.geometry is not None:
            found = fast_crop(self.row, self.parameters, self.options, self.geometry)
        if found is not None:
            self.sets.append(KeptSet("top_w", "Top-W", found.kept, found.certified))
        self.sets.append(KeptSet("without_distances", "Top-W without distances", base.kept))

    def _is_certified(self, base: bool) -> bool:
        """Whether no distance can change the set (docs/contract/graph.md, section 4)."""
        return base and (self.parameters.geom_scale >= 0 or self.parameters.greedy)

    def _kept(self, rule: RuleParameters) -> Ids:
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
        wanted = "top_w" if self.step.request.rule.chosen is TOP_W else "chosen"
        return next((each for each in self.sets if each.name == wanted), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        by_name = {each.name: each for each in self.sets}
        top_w, base = by_name.get("top_w"), by_name["without_distances"]
        added, dropped = self._moved(top_w, base)
        kept = self.drawn_from
        shown = self._shown([added, dropped])
        return {
            "object": "topw.inspection",
            "position": self.step.position,
            "rule": self.step.request.rule.chosen.name,
            "parameters": asdict(self.parameters),
            "metric": self.options.metric,
            "distances_unavailable": self.why,
            "token": self._token_drawn(kept),
            "certified": None if top_w is None else top_w.certified,
            "added": len(added),
            "dropped": len(dropped),
            "sets": [self._set_as_dict(each) for each in self.sets],
            "tokens": self._tokens_as_dicts(shown, kept, {"added": added, "dropped": dropped}),
            "rest": {"tokens": len(self.row) - len(shown), "probability": _short(1 - self.probability[shown].sum())},
            "plane": self._plane(shown, [each for each in (kept, top_w, base) if each is not None], [added, dropped]),
        }

    def _moved(self, top_w: KeptSet | None, base: KeptSet) -> tuple[Ids, Ids]:
        """The tokens that distances added, and those that they dropped, each by descending logit."""
        if top_w is None:
            none = np.zeros(0, np.int64)
            return none, none
        return top_w.ids[~np.isin(top_w.ids, base.ids)], base.ids[~np.isin(base.ids, top_w.ids)]

    def _shown(self, moved: Sequence[Ids]) -> Ids:
        """The drawn token, some that distances moved, and the likeliest others, by descending logit."""
        first = np.concatenate([[self.step.token], *(ids[: MOVED // 2] for ids in moved)]).astype(np.int64)
        others = self.order[: SHOWN + len(first)]
        wanted = np.concatenate([np.unique(first), others[~np.isin(others, first)]])[:SHOWN]
        return self.order[np.isin(self.order, wanted)]

    def _token_drawn(self, kept: KeptSet | None) -> dict[str, Any]:
        """The token of the text, and the one that the recomputed step draws, if the request had a seed."""
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
        if self.step.seeded and kept is not None:
            u = uniform_for(request.seed, self.step.position, request.sample)
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
        weight = np.zeros(len(self.row)) if kept is None else _within(self.row, kept.ids, self.parameters)
        nearest = self._nearest(shown, kept)
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

    def _nearest(self, shown: Ids, kept: KeptSet | None) -> Floats | None:
        """The distance [n] of each token to the nearest other one that was kept; None if there is none."""
        if self.geometry is None or kept is None or len(kept.ids) < 2:
            return None
        members = kept.ids[: self.options.top_m]
        distances = self.geometry.distances(shown, members)
        distances[shown[:, None] == members] = np.inf
        return np.asarray(distances.min(axis=1))

    def _plane(self, shown: Ids, of: Sequence[KeptSet], moved: Sequence[Ids]) -> dict[str, Any] | None:
        """The tokens of the given sets, and the drawn one, in a plane; None if distances are all equal or unknown.

        moved: tokens that distances added or dropped; some of them come first.
        """
        if self.geometry is None or self.options.metric == "uniform":
            return None
        inside = np.any([np.isin(shown, each.ids) for each in of], axis=0) | (shown == self.step.token)
        wanted = shown[inside]
        if len(wanted) < 3:
            return None
        first = np.isin(wanted, [self.step.token, *(token for ids in moved for token in ids[: MOVED // 2])])
        chosen = np.argsort(~first, kind="stable")[:PLACED]
        ids = wanted[np.sort(chosen)]
        plane = in_plane(self.geometry.distances(ids, ids))
        return {
            "share": _short(plane.share),
            "points": [
                {"id": token, "x": _short(x), "y": _short(y)}
                for token, (x, y) in zip(ids.tolist(), plane.points.tolist(), strict=True)
            ],
        }


def _softmax(row: Logits, temperature: float) -> Floats:
    """Probabilities [V] at the temperature; at 1 for a greedy row."""
    scaled = row.astype(np.float64) - row.max()
    weights: Floats = np.exp(scaled / (1.0 if temperature < GREEDY_BELOW else temperature))
    return weights / weights.sum()


def _within(row: Logits, ids: Ids, parameters: TopWParameters) -> Floats:
    """Probabilities [V] of the draw from a kept set."""
    found = np.zeros(len(row))
    if parameters.greedy:
        found[ids[0]] = 1.0
    else:
        found[ids] = _softmax(row[ids], parameters.temperature)
    return found


def _short(value: float) -> float:
    """A float with 6 significant digits, for JSON."""
    return float(f"{value:.6g}")
