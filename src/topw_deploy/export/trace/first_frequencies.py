"""Rotary embeddings that keep the frequencies they start with while a model is traced.

`longrope` and `dynamic` take others once a sequence outgrows the length trained on. They decide that in every call, by
the values of its positions, and write the result into the module: neither can be traced. Nor is it needed, since the
context of an export ends at that length (`checkpoint.switching_rope`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_FIXED = "default"


@contextlib.contextmanager
def first_frequencies(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the rotary embeddings of `model` compute with the frequencies that they hold now."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str | dict)]
    before = [module.rope_type for module in modules]
    for module, kind in zip(modules, before, strict=True):
        vars(module)["rope_type"] = dict.fromkeys(kind, _FIXED) if isinstance(kind, dict) else _FIXED
    try:
        yield
    finally:
        for module, kind in zip(modules, before, strict=True):
            vars(module)["rope_type"] = kind
