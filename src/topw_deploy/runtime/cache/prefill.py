"""Bindings for prompt chunks that only fill the cache."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from topw_deploy.runtime.allowed import NAME as ALLOWED
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.runtime.rules import Rules
from topw_deploy.sampling.mask import ALL
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters

_NO_EDIT = {"edit_ids": (np.int64, -1), "edit_penalty": (np.float32, 1), "edit_bias": (np.float32, 0)}
AnyBinding = TypeVar("AnyBinding", bound=Binding)


def greedy(session: Session, binding: AnyBinding, batch: int) -> AnyBinding:
    """Bind greedy sampling without edits and masks, the cheapest inputs. Returns `binding`."""
    parameters = TopWParameters(temperature=0.0)
    for name in (*PARAMETER_NAMES, "uniform"):
        if name in session.inputs:
            binding.bind_array(name, np.full(batch, getattr(parameters, name, 0.0), np.float32))
    for name, (dtype, value) in _NO_EDIT.items():
        if name in session.inputs:
            binding.bind_array(name, np.full((batch, session.fixed_edits or 0), value, dtype))
    if ALLOWED in session.inputs:
        words = session.mask_words if session.always_masked else 0
        binding.bind_array(ALLOWED, np.full((batch, words), ALL, np.int32))
    for name, array in Rules(batch).arrays.items():
        if name in session.inputs:
            binding.bind_array(name, array)
    return binding
