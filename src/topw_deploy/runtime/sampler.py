"""`TopWSampler`: Top-W, or another rule, on logits from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES
from topw_deploy.errors import GenerationError, ParameterError, one_line
from topw_deploy.manifest import ModelFolder, SamplerManifest
from topw_deploy.runtime.inputs import EDIT_INPUTS, rule_arrays, uniforms
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.parameters import OF_KEPT_SET, check_names, integer, values_per_prompt
from topw_deploy.runtime.prepare import check_rule, longest_pool, with_preset
from topw_deploy.runtime.session import SessionKeywords, SessionOptions, takes_session_options
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.row import ALL_ALLOWED, pack_mask
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, RuleParameters
from topw_deploy.sampling.seeds import SEED_BITS
from topw_deploy.text import short_repr

_NO_MEDIAN = (
    "this folder has no median distance of likely pairs; export the sampler again with the model's logits (--logits "
    "FILE.npy), or give geom_scale with geom_unit raw"
)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One draw per row, for B rows and a vocabulary of V tokens.

    next_token: int64 [B].
    logprob: float32 [B], of the token in the renormalized kept set.
    kept: int32 [B], the kept set's size.
    certified: bool [B], whether the kept set was proven without geometry (docs/contract/graph.md section 4).
    mass: float32 [B], the kept set's share of the full softmax; None if the graph does not return it.
    keep_mask: bool [B, V], the kept set; None if the graph does not return it.
    """

    next_token: np.ndarray
    logprob: np.ndarray
    kept: np.ndarray
    certified: np.ndarray
    mass: np.ndarray | None = None
    keep_mask: np.ndarray | None = None


class TopWSampler:
    """Samples from logits with a folder from `topw export-sampler`. Open one with `from_pretrained`.

    provider: onnxruntime's provider name.
    sampler: "native" or "graph" (docs/guide/native.md).
    why_graph: why `sampler` is "graph".
    cpu_nodes: the nodes that onnxruntime left on the CPU; see `CpuNode`.
    """

    def __init__(self, folder: ModelFolder, session: GraphSession) -> None:
        self.manifest = folder.manifest
        self.provider = session.provider
        self.sampler, self.why_graph = session.sampler, session.why_graph
        self.vocab_size = folder.manifest.sampler.vocab_size
        self._session = session
        self._outputs = [name for name in SAMPLER_OUTPUT_TYPES if name in session.outputs]
        self.cpu_nodes = session.cpu_nodes

    @classmethod
    @takes_session_options
    def from_pretrained(cls, path: str | Path, **session: Unpack[SessionKeywords]) -> TopWSampler:
        """Open a sampler-only folder.

        session: the provider, its options, threads and the sampler; see `SessionOptions`.

        Raises ManifestError, ProviderError, or ParameterError for an invalid option.
        """
        folder = ModelFolder(path, SamplerManifest)
        return cls(folder, GraphSession(folder, SessionOptions(**session)))

    def sample(
        self,
        logits: np.ndarray,
        *,
        uniform: np.ndarray | Sequence[float] | float | None = None,
        seed: int | Sequence[int] | None = None,
        position: int | Sequence[int] | None = None,
        edit_ids: np.ndarray | None = None,
        edit_penalty: np.ndarray | None = None,
        edit_bias: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
        **parameters: Any,
    ) -> Samples:
        """Draw one token per row of `logits`, with `uniform`, or `seed` and `position`.

        logits: float [B, V] or [V].
        uniform: draws in [0, 1), one for all rows or one per row.
        seed, position: key of the draws (docs/contract/random.md); position: tokens before the draw.
        edit_ids: int64 [B, N], tokens to edit, padded with -1.
        edit_penalty, edit_bias: float32 [B, N] (section 6).
        allowed: tokens that may be drawn, bool [B, V] or packed int32 [B, ceil(V / 32)] (section 6). None: all.
        parameters: `rule` and the rules' parameters (docs/contract/rules.md), and `preset`, Top-W's parameters and
            `geom_unit`, instead of the export's; one value or one per row.

        Raises ParameterError for bad arguments, GenerationError for invalid logits.
        """
        if isinstance(logits, np.ma.MaskedArray):
            raise ParameterError("logits is a masked array; fill it, with -inf where a token must not be drawn.")
        logits = np.ascontiguousarray(np.atleast_2d(_read_array("logits", logits, np.float32)))
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or not logits.size:
            raise ParameterError(f"logits have the shape {logits.shape}, but must be [batch, {self.vocab_size}].")
        rows = len(logits)
        feeds = {"logits": logits, "uniform": _read_uniform(rows, uniform, seed, position)}
        feeds |= self._read_parameters(rows, parameters)
        feeds |= _read_edits(rows, self.vocab_size, edit_ids, edit_penalty, edit_bias)
        feeds["allowed"] = self._read_mask(rows, allowed)
        try:
            found = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        except Exception as error:  # noqa: BLE001  # unrelated classes
            raise GenerationError(f"onnxruntime failed: {one_line(error)}") from None
        invalid = np.flatnonzero(found["next_token"] < 0)
        if len(invalid):
            raise GenerationError(
                f"the logits of row {', '.join(map(str, invalid[:8]))} contain NaN or +infinity, "
                "or nothing finite after the edits and the mask."
            )
        return Samples(**found)

    def _read_mask(self, rows: int, allowed: Any) -> np.ndarray:
        words, vocab = self._session.mask_words, self.vocab_size
        if allowed is None:
            return np.full((rows, words if self._session.always_masked else 0), ALL_ALLOWED, np.int32)
        try:
            given = np.atleast_2d(allowed)
        except ValueError:  # rows of different lengths
            given = np.empty(0, object)
        if given.shape != {"bool": (rows, vocab), "int32": (rows, words)}.get(given.dtype.name):
            raise ParameterError(
                f"allowed is {given.dtype} {list(given.shape)}, but must be bool [{rows}, {vocab}] or int32 "
                f"[{rows}, {words}], a bit per token."
            )
        return np.ascontiguousarray(pack_mask(given) if given.dtype == np.bool_ else given)

    def _read_parameters(self, rows: int, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The inputs of Top-W's parameters and of the rules, with a value for each row."""
        named = check_names(given, OF_KEPT_SET)
        columns = {name: values_per_prompt(name, value, rows, "rows") for name, value in named.items()}
        resolve = cache(lambda *stated: self._resolve_row(dict(zip(columns, stated, strict=True))))
        by_row = zip(*columns.values(), strict=True) if columns else [()] * rows
        resolved = [resolve(*stated) for stated in by_row]
        arrays = rule_arrays(rule for _, rule in resolved)
        for name in PARAMETER_NAMES:
            arrays[name] = np.array([getattr(top_w, name) for top_w, _ in resolved], np.float32)
        return arrays

    def _resolve_row(self, stated: Mapping[str, Any]) -> tuple[TopWParameters, RuleParameters]:
        info, median = self.manifest.sampler, self.manifest.median_distance
        named = with_preset({n: v for n, v in stated.items() if v is not None}, info.geometry, median, _NO_MEDIAN)
        rule = RuleParameters(**{name: value for name, value in named.items() if name in RULE_PARAMETER_NAMES})
        check_rule(rule, info.rules, longest_pool(self.sampler, info), self.vocab_size)
        every = {**self.manifest.stated_defaults, **named}
        return TopWParameters(**{name: every[name] for name in PARAMETER_NAMES}), rule


def _read_array(name: str, given: Any, dtype: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Convert to an array of `dtype`, broadcast to `shape`. Raises ParameterError for anything else, such as text."""
    try:
        array = np.asarray(given)
        whole = not array.size or not np.issubdtype(dtype, np.integer) or array.dtype.kind in "iu"
        if array.dtype.names or array.dtype.kind in "OUSmMc" or not whole:
            raise TypeError
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
        return array if shape is None else np.ascontiguousarray(np.broadcast_to(array, shape))
    except (TypeError, ValueError, OverflowError):
        kind = "integers" if np.issubdtype(dtype, np.integer) else "real numbers"
        size = "an array of" if shape is None else f"one number, or an array {list(shape)}, of"
        raise ParameterError(f"{name} is {short_repr(given)}, but must be {size} {kind}.") from None


def _read_uniform(rows: int, uniform: Any, seed: Any, position: Any) -> np.ndarray:
    if (uniform is None) == (seed is None) or (seed is None) != (position is None):
        raise ParameterError("give either uniform, or seed and position.")
    if uniform is not None:
        values = _read_array("uniform", uniform, np.float32, (rows,))
        if not ((values >= 0) & (values < 1)).all():
            raise ParameterError(f"uniform is {short_repr(uniform)}, but must be in [0, 1) (as float32) for every row.")
        return values
    keys = [_read_keys(*each, rows) for each in (("seed", seed), ("position", position))]
    return np.concatenate([uniforms(seed, position, 1) for seed, position in zip(*keys, strict=True)])


def _read_keys(name: str, value: Any, rows: int) -> list[int]:
    several = isinstance(value, (list, tuple, range)) or (isinstance(value, np.ndarray) and value.ndim == 1)
    read = integer(0, 2**SEED_BITS)
    values = [read(name, each) for each in value] if several else [read(name, value)] * rows
    if len(values) != rows:
        raise ParameterError(f"{name} has {len(values)} values for {rows} rows; give one for all or one for each.")
    return values


def _read_edits(rows: int, vocab: int, ids: Any, penalty: Any, bias: Any) -> dict[str, np.ndarray]:
    ids = _read_array("edit_ids", np.full((rows, 0), -1) if ids is None else ids, np.int64)
    penalty = _read_array("edit_penalty", np.ones(ids.shape) if penalty is None else penalty, np.float32)
    bias = _read_array("edit_bias", np.zeros(ids.shape) if bias is None else bias, np.float32)
    edits = dict(zip(EDIT_INPUTS, (ids, penalty, bias), strict=True))
    for name, array in edits.items():
        if array.ndim != 2 or array.shape != (rows, ids.shape[1]):
            raise ParameterError(f"{name} has the shape {array.shape}, but must be [{rows}, edits] like the other two.")
    used = np.sort(ids, axis=1)
    if not ((ids >= -1) & (ids < vocab)).all() or ((np.diff(used) == 0) & (used[:, 1:] >= 0)).any():
        raise ParameterError(f"edit_ids must be -1 (padding) or token ids below {vocab}, each at most once in a row.")
    if not ((penalty > 0) & np.isfinite(penalty)).all() or np.isnan(bias).any() or (bias == np.inf).any():
        raise ParameterError("edit_penalty must be finite and > 0, edit_bias a number below +infinity (-inf bans).")
    return edits
