"""Other implementations of the sampling rules: transformers' warpers, the authors' code, vLLM's, and direct formulas.

A peer takes logits [V], float32 or float64 and already divided by the temperature, and the rule's values (v0, v1). It
returns the kept ids, ascending.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as warpers

Peer = Callable[[Tensor, tuple[float, float]], np.ndarray]

_NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def _warper(make: Callable[[float], LogitsProcessor]) -> Peer:
    return lambda logits, values: _finite(make(values[0])(_NO_IDS, logits[None])[0])


def _finite(scores: Tensor) -> np.ndarray:
    return scores.isfinite().nonzero()[:, 0].numpy()


def _top_h_of_transformers(logits: Tensor, values: tuple[float, float]) -> np.ndarray:
    warper = warpers.TopHLogitsWarper(values[0])
    warper.top_n = int(values[1])
    return _finite(warper(_NO_IDS, logits[None])[0])


def _p_less(logits: Tensor, _: tuple[float, float]) -> np.ndarray:
    p = logits.softmax(0)
    return (p >= p.square().sum()).nonzero()[:, 0].numpy()


def _top_n_sigma(logits: Tensor, values: tuple[float, float]) -> np.ndarray:
    finite = logits[logits.isfinite()]
    sigma = float(finite.std()) if len(finite) > 1 else 0.0
    return (logits >= finite.max() - values[0] * sigma).nonzero()[:, 0].numpy()


def _min_k(logits: Tensor, values: tuple[float, float]) -> np.ndarray:
    """Min-k by the paper's formulas on the sorted logits. Keeps all tokens whose logit equals the last kept one."""
    ordered = logits[logits.isfinite()].sort(descending=True).values.tolist()
    span = ordered[0] - ordered[-1]
    if span == 0:
        return logits.isfinite().nonzero()[: len(ordered) if values[0] > 0 else 1, 0].numpy()
    best, cliff = -1.0, 1
    for i in range(1, len(ordered)):
        decay = (ordered[i - 1] - ordered[i]) / span / i
        if decay > best:
            best, cliff = decay, i
    size = min(max(cliff, int(values[0] / span)), len(ordered))
    return (logits >= ordered[size - 1]).nonzero()[:, 0].numpy()


TRANSFORMERS: Mapping[str, Peer] = {
    "top_k": _warper(lambda k: warpers.TopKLogitsWarper(int(k))),
    "top_p": _warper(warpers.TopPLogitsWarper),
    "min_p": _warper(warpers.MinPLogitsWarper),
    "top_h": _top_h_of_transformers,
    "typical": _warper(warpers.TypicalLogitsWarper),
    "epsilon": _warper(warpers.EpsilonLogitsWarper),
    "eta": _warper(warpers.EtaLogitsWarper),
}
"""Rule -> transformers' warper as a peer."""

FORMULAS: Mapping[str, Peer] = {"top_n_sigma": _top_n_sigma, "p_less": _p_less, "min_k": _min_k}
"""Rule without a warper in transformers -> its formula as a peer."""


def authors_top_h(path: Path) -> Peer:
    """The class TopH_LogitsProcessor of the authors' logit_processor.py as a peer. It raises IndexError on some rows.

    The peer cuts the pool to the vocabulary, because the class raises an error for a larger one.
    """
    made = _load(path).TopH_LogitsProcessor

    def kept(logits: Tensor, values: tuple[float, float]) -> np.ndarray:
        pool = min(int(values[1]), len(logits))
        return _finite(made(top_n=pool, alpha=values[0])(_NO_IDS, logits[None])[0])

    return kept


def authors_top_n_sigma(path: Path) -> Peer:
    """The class TopNSigma of the authors' hf_nsigma.py as a peer."""
    made = _load(path).TopNSigma
    return lambda logits, values: _finite(made(values[0], "cpu")(_NO_IDS, logits[None])[0])


def authors_p_less(path: Path) -> Peer:
    """The function p_less_decode of the authors' p_less_samplers.py as a peer.

    The peer returns the tokens with a positive probability when the function draws. There are none if rounding puts all
    probabilities below the threshold; the function then draws from NaN.
    """
    made = _load(path)

    def kept(logits: Tensor, _: tuple[float, float]) -> np.ndarray:
        with mock.patch.object(torch, "multinomial", return_value=_NO_IDS) as multinomial:
            made.p_less_decode(logits.softmax(0)[None])
        return (multinomial.call_args.args[0][0] > 0).nonzero()[:, 0].numpy()

    return kept


_FROM_VLLM = {
    "vllm": ("SamplingParams",),
    "vllm.utils.torch_utils": ("async_tensor_h2d",),
    "vllm.v1.sample.logits_processor.interface": ("BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
}
"""Module of vLLM -> the names that builtin.py imports from it. MinKLogitsProcessor uses none of them here."""


def vllm_min_k(path: Path) -> Peer:
    """The class MinKLogitsProcessor of vLLM's logits_processor/builtin.py as a peer. Loads the file without vLLM."""
    modules = {name: ModuleType(name) for name in _FROM_VLLM}
    for name, module in modules.items():
        vars(module).update({wanted: type(wanted, (), {}) for wanted in _FROM_VLLM[name]})
    with mock.patch.dict(sys.modules, modules):
        made = _load(path).MinKLogitsProcessor
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))

    def kept(logits: Tensor, values: tuple[float, float]) -> np.ndarray:
        processor = made(config, torch.device("cpu"), False)
        request: tuple[int, SimpleNamespace, None, list[int]] = (
            0,
            SimpleNamespace(min_k=True, min_k_tau=values[0]),
            None,
            [],
        )
        processor.update_state(SimpleNamespace(batch_size=1, added=[request], removed=[], moved=[]))
        return _finite(processor.apply(logits[None].clone())[0])

    return kept


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"authors_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path} is not a Python file; give the path of the authors' file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
