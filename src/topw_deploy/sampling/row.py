"""One row from logits to token, with the numbers the graph sees (docs/contract/graph.md, sections 3 to 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.draw import draw
from topw_deploy.sampling.edits import apply_edits
from topw_deploy.sampling.geometry import Geometry, Ids
from topw_deploy.sampling.parameters import GREEDY_BELOW, TopWOptions, TopWParameters, check_range
from topw_deploy.sampling.reference import Crop, Ties, crop


@dataclass(frozen=True, slots=True)
class Row:
    """What the graph answers for one row, and what only the reference knows.

    next_token: -1 if the row is invalid; logprob: under the renormalised crop at `temperature`, 0 for a greedy or
    invalid row; kept: the crop's size; certified; mass: the crop's probability under the full softmax at the
    selection temperature. Beyond the graph: kept_ids, ties, and draw_margin (see `draw`; inf where nothing is drawn).
    """

    next_token: int = -1
    logprob: float = 0.0
    kept: int = 0
    kept_ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    certified: bool = False
    mass: float = 0.0
    ties: Ties = field(default_factory=Ties)
    draw_margin: float = math.inf

    @property
    def valid(self) -> bool:
        return self.next_token >= 0


def as_float32(parameters: TopWParameters | Mapping[str, float]) -> TopWParameters:
    """The parameters as a graph receives them: each rounded to float32.

    A mapping may leave names out (defaults). Raises ParameterError where the rounded value is out of range: 1e-50 is
    a valid init_top_p, but 0 in float32.
    """
    given = asdict(parameters) if isinstance(parameters, TopWParameters) else parameters
    with np.errstate(over="ignore"):
        rounded = {name: float(np.float32(value)) for name, value in given.items()}
    try:
        return TopWParameters(**rounded)
    except ParameterError:
        for name, value in rounded.items():
            check_range(name, given[name], value)  # says what was given, where TopWParameters knows the rounded value
        raise


def sample_row(
    logits: ArrayLike,
    parameters: TopWParameters | Mapping[str, float],
    options: TopWOptions | None = None,
    geometry: Geometry | None = None,
    uniform: float = 0.0,
    edits: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
) -> Row:
    """Edit, crop and draw one row, as the graph does but in float64 from its float32 inputs.

    logits: [V], any float type, cast to float32. parameters: a mapping may hold values out of range. uniform: u in
    [0, 1), taken as float32. edits: (ids, penalty, bias), see `apply_edits`.
    An invalid row (NaN, +inf or nothing finite among the edited logits, a parameter or u out of range) is answered
    with `Row()`, as a graph cannot raise. Raises ParameterError for what a graph could not run either: a wrong shape,
    edits out of range, a geometry of another metric.
    """
    with np.errstate(over="ignore"):
        row = np.asarray(logits).astype(np.float32)
    if edits is not None:
        row = apply_edits(row, *edits)
    u = float(np.float32(uniform))
    try:
        rounded = as_float32(parameters)
    except ParameterError:
        return Row()
    if not _usable(row) or not 0 <= u < 1:
        return Row()
    chosen = crop(row, rounded, options, geometry)
    mass = crop_mass(row, chosen, rounded)
    if rounded.greedy:
        return Row(int(chosen.kept[0]), 0.0, 1, chosen.kept, True, mass, chosen.ties)
    drawn = draw(row, chosen.kept, rounded.temperature, u)
    return Row(
        drawn.token, drawn.logprob, len(chosen.kept), chosen.kept, chosen.certified, mass, chosen.ties, drawn.margin
    )


def crop_mass(logits: ArrayLike, chosen: Crop, parameters: TopWParameters) -> float:
    """The crop's probability under the softmax of the whole row [V] at the selection temperature.

    A selection temperature in the greedy range leaves all mass on the argmax: 1.
    """
    selection = parameters.selection_temperature or parameters.temperature
    if selection < GREEDY_BELOW:
        return 1.0
    row = np.asarray(logits).astype(np.float64)
    w = np.exp((row - row.max()) / selection)
    return float(w[chosen.kept].sum() / w.sum())


def _usable(row: NDArray[np.float32]) -> bool:
    return not np.isnan(row).any() and not (row == np.inf).any() and bool(np.isfinite(row).any())
