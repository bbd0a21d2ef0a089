"""Runs that draw nothing: pieces of a prompt that only fill the cache."""

from __future__ import annotations

import numpy as np

from topw_deploy.runtime.session import Binding, GraphSession, graph_inputs
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters

_NO_EDIT = {"edit_ids": (np.int64, -1), "edit_penalty": (np.float32, 1), "edit_bias": (np.float32, 0)}


def neutral_binding(session: GraphSession, batch: int) -> Binding:
    """A binding whose sampler is greedy and edits nothing, which is what costs it least, and whose draw nobody gets.

    A row's own parameters have no place here: they are meant for the logits after its whole prompt.
    """
    binding = Binding(session)
    greedy = TopWParameters(temperature=0.0)
    values = {name: getattr(greedy, name) for name in PARAMETER_NAMES} | {"uniform": 0.0}
    for node in graph_inputs(session.raw):
        if node.name in values:
            binding.bind_array(node.name, np.full(batch, values[node.name], np.float32))
        elif node.name in _NO_EDIT:
            dtype, value = _NO_EDIT[node.name]
            slots = node.shape[1] if isinstance(node.shape[1], int) else 0
            binding.bind_array(node.name, np.full((batch, slots), value, dtype))
    return binding
