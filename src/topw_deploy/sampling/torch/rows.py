"""The parameters of a batch as columns, one value per row or one for all (docs/contract/graph.md, section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import GREEDY_BELOW, PARAMETER_NAMES, TopWParameters, canonical_names

TensorParameters = TopWParameters | Mapping[str, "float | Tensor"]
"""One set of numbers for all rows, or numbers and tensors [B] by name. Missing names get defaults."""


@dataclass(frozen=True)
class ParameterColumns:
    """Parameters as tensors [B, 1], or [1, 1] where all rows share them.

    reward: beta - lam.
    unit: max(1, lam, beta), the scale of differences in J.
    selection: the temperature that chooses the crop, 1 for greedy rows.
    compares_prefixes: int64, 0 where a row keeps one token without comparing prefixes (greedy, beta <= lam), else 1.
    in_range: whether every parameter is in its interval.
    """

    lam: Tensor
    reward: Tensor
    unit: Tensor
    selection: Tensor
    init_top_p: Tensor
    geom_scale: Tensor
    greedy: Tensor
    compares_prefixes: Tensor
    in_range: Tensor

    def of_rows(self, rows: Tensor) -> ParameterColumns:
        """The parameters of the rows with these indices [R]."""
        columns = (getattr(self, f.name) for f in fields(self))
        return ParameterColumns(*(column if len(column) == 1 else column[rows] for column in columns))


def working_dtype(device: torch.device) -> torch.dtype:
    """The floating type of decisions: float64, or float32 on MPS, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_parameters(parameters: TensorParameters, batch: int, device: torch.device) -> ParameterColumns:
    """Read the parameters of a batch.

    Raises ParameterError for unknown names, numbers out of range and tensors that are not [batch]. Values of tensors
    are not checked here, because that would sync the device; `in_range` marks the rows with valid ones.
    """
    if isinstance(parameters, TopWParameters):
        return _shared_columns(parameters, device)
    given = canonical_names(parameters)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    shared = TopWParameters(**{name: value for name, value in given.items() if name not in tensors})
    if not tensors:
        return _shared_columns(shared, device)
    columns = {}
    for name in PARAMETER_NAMES:
        value = tensors.get(name)
        if value is not None and value.shape != (batch,):
            raise ParameterError(f"{name} has shape {tuple(value.shape)}, but must be a number or [{batch}].")
        dtype = working_dtype(device)
        columns[name] = (
            value.to(device=device, dtype=dtype)[:, None]
            if value is not None
            else torch.full((1, 1), getattr(shared, name), dtype=dtype, device=device)
        )
    return _derive_columns(columns)


@lru_cache(maxsize=64)
def _shared_columns(parameters: TopWParameters, device: torch.device) -> ParameterColumns:
    """Columns with one value for all rows. Cached, because a decoding loop passes the same numbers at every step."""
    values = [getattr(parameters, name) for name in PARAMETER_NAMES]
    stacked = torch.tensor(values, dtype=working_dtype(device), device=device)[:, None, None]
    return _derive_columns(dict(zip(PARAMETER_NAMES, stacked, strict=True)))


def _derive_columns(given: Mapping[str, Tensor]) -> ParameterColumns:
    lam, beta, share, scale = given["lam"], given["beta"], given["init_top_p"], given["geom_scale"]
    temperature, selection = given["temperature"], given["selection_temperature"]
    greedy = temperature < GREEDY_BELOW
    in_range = scale.isfinite() & (share > 0) & (share <= 1)
    for value in (lam, beta, temperature, selection):
        in_range = in_range & (value >= 0) & value.isfinite()
    chosen = torch.where(selection > 0, selection, temperature)
    return ParameterColumns(
        lam=lam,
        reward=beta - lam,
        unit=torch.maximum(lam, beta).clamp(min=1.0),
        selection=torch.where(greedy, 1.0, chosen),
        init_top_p=share,
        geom_scale=scale,
        greedy=greedy,
        compares_prefixes=((beta > lam) & ~greedy).to(torch.int64),
        in_range=in_range,
    )
