"""Trace convolution and recurrent mixers as markers.

Most mixers of transformers call functions of their Python module for the convolution and the recurrence; these
functions are replaced. A mixer that computes them in its own forward has an adapter instead (see mixer_adapters).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from transformers import Cache, PreTrainedModel

from topw_deploy.export.trace.mixer_adapters import ADAPTERS, METHODS, layer_of
from topw_deploy.export.trace.mixer_markers import MixerMarkers
from topw_deploy.export.trace.recurrences import (
    causal_convolution,
    gated_delta_rule,
    selective_scan,
    state_space_dual,
)

# The functions that a call without past states uses: a traced cache returns no past states.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": state_space_dual,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
}
# Models with a cache class of their own; all their layers have adapters.
_WITHOUT_CACHE = {"RwkvForCausalLM", "xLSTMForCausalLM"}
# Cache classes that a model checks for; any cache passes the check during the trace.
_CACHE_CLASSES = ("MiniMaxCache",)


@contextlib.contextmanager
def marked_mixers(model: PreTrainedModel, markers: MixerMarkers) -> Iterator[None]:
    """Make the mixers of `model` call `markers` inside the block."""
    with contextlib.ExitStack() as changes:
        for module in modeling_modules(model):
            for name, function in _FUNCTIONS.items():
                if hasattr(module, name):
                    changes.enter_context(_replaced(module, name, partial(function, markers)))
            for name in _CACHE_CLASSES:
                if hasattr(module, name):
                    changes.enter_context(_replaced(module, name, Cache))
        for name, mixer in model.named_modules():
            kind = type(mixer).__name__
            if kind in ADAPTERS:
                method = METHODS.get(kind, "forward")
                vars(mixer)[method] = partial(ADAPTERS[kind], mixer, markers, layer_of(name))
                changes.callback(vars(mixer).pop, method)
        yield


def takes_cache(model: PreTrainedModel) -> bool:
    return type(model).__name__ not in _WITHOUT_CACHE


def modeling_modules(model: PreTrainedModel) -> list[ModuleType]:
    """The Python modules that define the classes of `model`'s submodules."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if ".modeling_" in name]


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
