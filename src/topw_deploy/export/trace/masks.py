"""Read which keys a query sees from the masks that transformers makes.

While a model is traced, a mask is a placeholder tensor, recognised by identity, or None where the model accepts None
for "all keys up to the query".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from topw_deploy.errors import UnsupportedModelError

_EXPECT_A_MASK = {"mpt"}  # model types that fail without one


@dataclass(frozen=True)
class Visible:
    """Which of the keys up to the query are visible to it.

    window: only the last `window` keys, the query's own included; 0 for no limit.
    chunk: only keys in the query's chunk of `chunk` tokens; 0 for no limit.
    """

    window: int = 0
    chunk: int = 0


class MaskPlaceholders:
    """Creates placeholders for masks (`make`) and records which keys each one shows (`visible`)."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, Visible]] = []  # keeps the tensors alive: they are recognised by identity

    def make(
        self,
        *_args: Any,
        mask_function: Callable[..., Any],
        config: Any = None,
        allow_is_causal_skip: bool = True,
        **_others: Any,
    ) -> torch.Tensor | None:
        """Create a mask, as a function of transformers' mask interface.

        Raises UnsupportedModelError for masks that depend on more than positions.
        """
        visible = _visible(mask_function)
        if visible == Visible() and allow_is_causal_skip and getattr(config, "model_type", "") not in _EXPECT_A_MASK:
            return None
        return self.stand_in(visible)

    def stand_in(self, visible: Visible) -> torch.Tensor:
        """A new placeholder mask, bool [1, 1, 1, 1]."""
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool)
        self._made.append((mask, visible))
        return mask

    def visible(self, mask: torch.Tensor | None) -> Visible | None:
        """The keys that `mask` shows, or None for a mask that was not created here."""
        if mask is None:
            return Visible()
        return next((visible for made, visible in self._made if made is mask), None)


def _visible(mask_function: Callable[..., Any]) -> Visible:
    limits = {"window": 0, "chunk": 0}
    causal = False
    for part in _parts(mask_function):
        name, known = part.__qualname__.split(".")[0], inspect.getclosurevars(part).nonlocals
        if part is masking_utils.causal_mask_function:
            causal = True
        elif name == "sliding_window_overlay":
            limits["window"] = int(known["sliding_window"])
        elif name == "chunked_overlay":
            limits["chunk"] = int(known["chunk_size"])
        elif not name.startswith(("bidirectional", "sliding_window_bidirectional")):
            raise UnsupportedModelError(
                f"the model's attention mask depends on more than positions ({name}), which the export does not "
                "support; choose another model or graft an ONNX decoder made by another exporter."
            )
    if not causal:
        raise UnsupportedModelError(
            "the model's attention sees later tokens, so it is not a causal decoder; choose a decoder-only language "
            "model."
        )
    return Visible(**limits)


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions that `and_masks` combined."""
    if mask_function.__qualname__.split(".")[0] != "and_masks":
        return [mask_function]
    combined = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    return [part for each in combined for part in _parts(each)]
