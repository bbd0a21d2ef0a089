"""Trace multimodal rotary embeddings with the positions of text, which are equal on every axis (time, height, width).

The choice of an axis for each frequency then changes nothing, and its nodes would keep attention from rotating inside
the operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

_SAMPLES = 7  # positions


def plain_for_text(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The multimodal rotary embeddings of `model` that compute plain rotary angles where the axes are equal."""
    return [module for module in model.modules() if hasattr(module, "mrope_section") and _is_plain_for_text(module)]


@contextlib.contextmanager
def positions_of_text(embeddings: list[torch.nn.Module], position_ids: torch.Tensor) -> Iterator[None]:
    """Make `embeddings` rotate by `position_ids` [batch, sequence] inside the block."""
    for module in embeddings:
        vars(module)["forward"] = partial(_rotary_factors, module, position_ids=position_ids)
    try:
        yield
    finally:
        for module in embeddings:
            del vars(module)["forward"]


def _rotary_factors(
    module: Any, x: torch.Tensor, *_: Any, position_ids: torch.Tensor, **_others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [batch, sequence, rotary_dim] in the type of `x`, with pairs half of them apart."""
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _is_plain_for_text(module: Any) -> bool:
    frequencies = getattr(module, "inv_freq", None)
    if not isinstance(frequencies, torch.Tensor) or not hasattr(module, "attention_scaling"):
        return False
    if frequencies.device.type == "meta":
        return False
    x, positions = torch.zeros(1), torch.arange(_SAMPLES)[None]
    try:
        wanted = module(x, positions.expand(3, 1, _SAMPLES))
    except Exception:  # noqa: BLE001  # an embedding that takes other arguments
        return False
    found = _rotary_factors(module, x, position_ids=positions)
    return len(wanted) == 2 and all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
