"""Sessions of exported decoders and samplers, and the references that an export is compared with.

Shares no code with the runtime, so that an error there cannot hide one of the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from topw_deploy.dtypes import array_name
from topw_deploy.errors import VerificationError
from topw_deploy.export.graph import GraphEditor, external_files, find_input, required_node_input
from topw_deploy.export.sampler.attach import sampler_node
from topw_deploy.export.sampler.node import SAMPLER_INPUTS
from topw_deploy.manifest import MODEL_NAME, DecoderInfo
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.rules import RuleParameters

Array = NDArray[np.generic]
_GROWTH = 64  # slots that a full buffer gets in addition; any number is right


def cache_driver(session: ort.InferenceSession, decoder: DecoderInfo, logits: str) -> CacheDriver:
    """A driver for the decoder's form of cache. logits: the name of the output that `step` returns."""
    drivers: dict[str, type[CacheDriver]] = {"concat": _ConcatDriver, "static": _StaticDriver, "shared": _SharedDriver}
    return drivers[decoder.kv_form](session, decoder, logits)


def empty_states(decoder: DecoderInfo, batch: int, length: int) -> dict[str, Array]:
    """Zeros for each input of past states, by name. length: of the axis for tokens."""
    return {
        state.past: np.zeros((batch, *(length if size == 0 else size for size in state.shape)), array_name(state.dtype))
        for state in decoder.states
    }


class CacheDriver:
    """Drives a decoder and its cache. Takes columns of tokens, in which padding may be anywhere."""

    def __init__(self, session: ort.InferenceSession, decoder: DecoderInfo, logits: str) -> None:
        self._session, self._decoder, self._logits = session, decoder, logits
        self._inputs = {value.name for value in session.get_inputs()}

    def start(self, batch: int) -> None:
        """Empty the cache, for a batch of this many rows."""
        raise NotImplementedError

    def step(self, ids: Array, attention_mask: Array) -> Array:
        """Run the next n columns. Returns the logits of each row's last token so far, [batch, vocab].

        ids: int64 [batch, n].
        attention_mask: int64 [batch, past + n].
        """
        raise NotImplementedError


class _ConcatDriver(CacheDriver):
    """Drives a cache that the graph takes as input and returns with the new tokens appended."""

    def start(self, batch: int) -> None:
        self._past = empty_states(self._decoder, batch, 0)

    def step(self, ids: Array, attention_mask: Array) -> Array:
        past, columns = attention_mask.shape[1] - ids.shape[1], ids.shape[1]
        width = self._decoder.most_columns or columns
        logits: Array = np.zeros(0)
        for start in range(0, columns, width):
            end = min(start + width, columns)
            found = self._run_columns(ids[:, start:end], attention_mask[:, : past + end])
            seen = np.any(attention_mask[:, past + start : past + end], axis=1, keepdims=True)
            logits = found if start == 0 else np.where(seen, found, logits)
        return logits

    def _run_columns(self, ids: Array, attention_mask: Array) -> Array:
        positions = np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions, **self._past}
        results = self._session.run(None, {name: feeds[name] for name in self._inputs})
        named = dict(zip((value.name for value in self._session.get_outputs()), results, strict=True))
        self._past = {state.past: named[state.present] for state in self._decoder.states}
        return named[self._logits]


class _InPlaceDriver(CacheDriver):
    """Drives a cache that the graph writes in place. A run uses one row of the buffers, or all."""

    def start(self, batch: int) -> None:
        self._used = np.zeros(batch, np.int64)  # length of each row
        self._slots = max(_GROWTH, self._decoder.buffer_least)
        self._buffers = empty_states(self._decoder, batch, self._slots)

    def _reserve(self, slots: int) -> None:
        if slots > self._slots:
            self._slots = slots + _GROWTH
            longer = empty_states(self._decoder, len(self._used), self._slots)
            for name, buffer in self._buffers.items():
                longer[name][tuple(slice(size) for size in buffer.shape)] = buffer
            self._buffers = longer

    def _run(self, rows: slice, feeds: dict[str, Array]) -> Array:
        binding = self._session.io_binding()
        feeds = {name: np.ascontiguousarray(value) for name, value in feeds.items() if name in self._inputs}
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for state in self._decoder.states:
            view = self._buffers[state.past][rows]
            place = ("cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
            binding.bind_input(state.past, *place)
            binding.bind_output(state.present, *place)
        binding.bind_output(self._logits)
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()


class _StaticDriver(_InPlaceDriver):
    """Drives a static cache. Its rows have no gaps, so attended columns are moved left; row lengths are an input."""

    def step(self, ids: Array, attention_mask: Array) -> Array:
        compact, lengths = _move_left(ids, attention_mask)
        columns = compact.shape[1]
        width = self._decoder.most_columns or columns
        self._reserve(int(self._used.max()) + columns)
        logits: Array = np.zeros(0)
        for start in range(0, columns, width):
            some = np.clip(lengths - start, 0, width)
            found = self._run_columns(compact[:, start : start + width], some)
            # A row without a token in this chunk keeps the logits of an earlier one.
            logits = found if start == 0 else np.where((some > 0)[:, None], found, logits)
            self._used += some
        return logits

    def _run_columns(self, ids: Array, lengths: NDArray[np.int64]) -> Array:
        """Run columns, for all rows at once if the decoder can, else row by row."""
        # A row without tokens runs one of padding, which its next token overwrites; a recurrent state would keep it.
        lengths = lengths if self._decoder.recurs else np.maximum(lengths, 1)
        is_ragged = self._decoder.evicts and len(set(lengths.tolist())) > 1
        if self._decoder.ragged_chunks or len(ids) == 1 or ids.shape[1] == 1 or not (self._used.any() or is_ragged):
            return self._run_rows(slice(None), ids, lengths)
        logits = [
            self._run_rows(slice(r, r + 1), ids[r : r + 1, : max(1, lengths[r])], lengths[r : r + 1])
            for r in range(len(ids))
        ]
        return np.concatenate(logits)

    def _run_rows(self, rows: slice, ids: Array, lengths: Array) -> Array:
        feeds = {"input_ids": ids, "write_indices": self._used[rows], "row_lengths": lengths}
        total = np.array([self._used[rows].max() + ids.shape[1]], np.int32)
        return self._run(rows, {**feeds, "total_sequence_length": total})


class _SharedDriver(_InPlaceDriver):
    """Drives the buffers of another exporter's GroupQueryAttention.

    Its row lengths are sums of the mask, and its logits those of the last column. So a batch of different lengths first
    runs all columns but the last, right-padded, and then each row's last token.
    """

    def step(self, ids: Array, attention_mask: Array) -> Array:
        compact, lengths = _move_left(ids, attention_mask)
        # A row without tokens runs one of padding, which its next token overwrites.
        run_lengths, columns = np.maximum(lengths, 1), compact.shape[1]
        self._reserve(int(self._used.max()) + columns)
        if len(ids) == 1 or columns == 1 or (run_lengths.min() == columns and not self._used.any()):
            logits = self._run_rows(slice(None), compact, self._used)
        elif self._used.any():
            rows = [slice(row, row + 1) for row in range(len(ids))]
            logits = np.concatenate(
                [self._run_rows(row, compact[row, : run_lengths[row][0]], self._used[row]) for row in rows]
            )
        else:
            self._run_rows(slice(None), compact[:, :-1], self._used)
            last_tokens = compact[np.arange(len(ids)), run_lengths - 1, None]
            logits = self._run_rows(slice(None), last_tokens, run_lengths - 1)
        self._used += lengths
        return logits

    def _run_rows(self, rows: slice, ids: Array, starts: NDArray[np.int64]) -> Array:
        """Run tokens without padding in rows whose caches hold `starts`, int64 [batch], tokens."""
        positions = starts[:, None] + np.arange(ids.shape[1])
        ends = positions[:, -1:] + 1
        mask = (np.arange(ends.max()) < ends).astype(np.int64)
        return self._run(rows, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def _move_left(ids: Array, attention_mask: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Move the ids of attended columns to the left.

    Returns ids without gaps [batch, columns >= 1], and the number of ids in each row, [batch].
    """
    attended = attention_mask[:, -ids.shape[1] :].astype(bool)
    lengths = attended.sum(axis=1)
    compact = np.zeros((len(ids), max(1, int(lengths.max()))), np.int64)
    for row, columns in enumerate(attended):
        compact[row, : lengths[row]] = ids[row, columns]
    return compact, lengths


LOGITS = "topw.probe.logits"


def open_graph(
    folder: Path, model: ir.Model, library: Path | None = None, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Open a session of `model`, a part of the export's graph.

    A graph with data files is written to a temporary file beside them. Raises VerificationError if the folder cannot be
    written.

    folder: of the export.
    library, options: see `open_session`.
    """
    if not external_files(model):
        return open_session(ir.to_proto(model).SerializeToString(), library, options)
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".topw-probe-", suffix=".onnx")
    except OSError as error:
        raise VerificationError(
            f"{folder} cannot be written ({error.strerror}), but verification needs a temporary file there; "
            "copy the folder and verify the copy."
        ) from error
    os.close(handle)
    try:
        ir.save(model, name)
        return open_session(name, library, options)
    finally:
        Path(name).unlink(missing_ok=True)


def open_session(
    model: str | bytes, library: Path | None = None, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Open a session of the CPU provider, whose results differ between machines only by rounding.

    model: a file or its content.
    library: the native sampler's library, which replaces the file's function; None for the function.
    options: of the session; None for the usual ones.
    """
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def decoder_driver(folder: Path, decoder: DecoderInfo) -> CacheDriver:
    """The exported decoder without its sampler: ids go in, the sampler's input `logits` comes out."""
    return cache_driver(open_graph(folder, decoder_model(folder)), decoder, LOGITS)


def decoder_model(folder: Path, *, argmax: bool = False) -> ir.Model:
    """The export's graph without sampler. Its outputs are the logits, or with `argmax` the token, and the cache."""
    model = ir.load(folder / MODEL_NAME)
    editor = GraphEditor(model.graph, "topw.probe")
    logits = required_node_input(sampler_node(model.graph).inputs[0])
    if argmax:
        output = editor.op("ArgMax", [logits], dtype=ir.DataType.INT64, shape=["batch"], axis=1, keepdims=0)
    else:
        output = editor.op("Identity", [logits], dtype=ir.DataType.FLOAT, shape=["batch", None], name=LOGITS)
    cache = [value for value in model.graph.outputs if (value.name or "").startswith("present.")]
    editor.finish()
    uniform, lengths = (find_input(model.graph, name) for name in ("uniform", "row_lengths"))
    if uniform is not None and lengths is not None:  # of as many rows
        ir.convenience.replace_all_uses_with(uniform, lengths)
    inputs = [value for value in model.graph.inputs if value.name not in SAMPLER_INPUTS]
    model.graph = ir.convenience.extract(model.graph, inputs, [output, *cache])
    return model


class SamplerProbe:
    """The exported sampler without its decoder. library: see `open_session`."""

    def __init__(self, folder: Path, library: Path | None = None) -> None:
        self._session = open_graph(folder, _sampler_model(folder), library)
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(
        self,
        logits: np.ndarray,
        parameters: Sequence[dict[str, float]],
        uniform: Sequence[float],
        allowed: np.ndarray | None = None,
        rules: Sequence[RuleParameters] | None = None,
    ) -> dict[str, Any]:
        """Sample once. Returns the node's outputs by name.

        logits: float32 [batch, vocab].
        parameters: Top-W's parameters of each row.
        uniform: the uniform number of each row.
        allowed: the masks, int32 [batch, words]; None allows all tokens.
        rules: the rule of each row; None for Top-W.
        """
        batch = len(logits)
        feeds: dict[str, np.ndarray] = {
            "logits": np.ascontiguousarray(logits, dtype=np.float32),
            "edit_ids": np.zeros((batch, 0), np.int64),
            "edit_penalty": np.zeros((batch, 0), np.float32),
            "edit_bias": np.zeros((batch, 0), np.float32),
            "allowed": np.zeros((batch, 0), np.int32) if allowed is None else allowed,
            "uniform": np.asarray(uniform, dtype=np.float32),
            **rule_arrays(rules or [RuleParameters()] * batch),
        }
        for name in parameters[0]:
            feeds[name] = np.asarray([row[name] for row in parameters], dtype=np.float32)
        return dict(zip(self._outputs, self._session.run(None, feeds), strict=True))


def _sampler_model(folder: Path) -> ir.Model:
    """The export's graph with an input `logits` in place of the decoder."""
    model = ir.load(folder / MODEL_NAME)
    node = sampler_node(model.graph)
    own = [value for value in model.graph.inputs if value.name in SAMPLER_INPUTS[1:]]
    model.graph = ir.convenience.extract(model.graph, [required_node_input(node.inputs[0]), *own], node.outputs)
    logits = model.graph.inputs[0]
    width = logits.shape[-1] if logits.shape is not None else None
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", width if isinstance(width, int) else "vocab"])
    return model


class TorchReference:
    """A transformers checkpoint, computed in float32, as a source of logits for sequences without padding.

    dtype: of the export; the weights are rounded to it.
    name: as shown in results.
    """

    name = "torch"

    def __init__(self, folder: Path, dtype: str, num_hidden_layers: int | None, trust_remote_code: bool) -> None:
        from topw_deploy.export.source.checkpoint import load_reference

        model = load_reference(folder, dtype, num_hidden_layers=num_hidden_layers, trust_remote_code=trust_remote_code)
        self.model = model.float()  # after rounding to the exported type

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """The logits after each of ids [n]: float32 [n, vocab]."""
        import torch

        with torch.no_grad():
            return self.model(**self._inputs(torch.from_numpy(ids)[None])).logits[0].float().numpy()

    def _inputs(self, ids: Any) -> dict[str, Any]:
        """The arguments of a call. Code that comes with the checkpoint gets those of transformers' `generate`."""
        from topw_deploy.export.trace.trace import is_own_code

        if not is_own_code(self.model):
            return {"input_ids": ids}
        try:
            found = self.model.prepare_inputs_for_generation(
                ids, attention_mask=ids.new_ones(ids.shape), use_cache=False
            )
        except Exception:  # noqa: BLE001  # a preparation for other versions of transformers
            return {"input_ids": ids}
        return {name: value for name, value in found.items() if value is not None}

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        """The logits at the end of each run: float32 [runs, vocab].

        runs: the sizes of the runs into which `ids` is split. How it is split can affect rounding.
        """
        return self.logits(ids)[np.cumsum(runs) - 1]

    def geometry(self, metric: str, vocab: int) -> Geometry:
        """The geometry of the first `vocab` rows of the embedding table."""
        if metric == "uniform":
            return Geometry.uniform()
        return Geometry.from_embeddings(self.model.get_input_embeddings().weight[:vocab].detach().numpy(), metric)


class OriginalDecoderReference:
    """The ONNX decoder to which a sampler was attached, with the methods of `TorchReference`.

    MatMulNBits on a CPU may round activations to 8 bits. A difference in the last digit of a float32, such as there is
    between single steps and a whole prompt, can then change a rounding and grow (measured: 0.11, for logits up to 16).
    So `logits_by_runs` splits the ids as the export's decoder does.
    """

    name = "the original decoder"

    def __init__(self, onnx: Path, decoder: DecoderInfo) -> None:
        self._session = open_session(str(onnx.resolve() if onnx.is_symlink() else onnx))
        self._decoder = decoder
        self._inputs = {value.name for value in self._session.get_inputs()}

    def logits(self, ids: np.ndarray) -> np.ndarray:
        rows = self._run(ids)
        if len(rows) == len(ids):
            return rows
        return np.concatenate([self._run(ids[: n + 1]) for n in range(len(ids))])  # it returns only the last logits

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        driver = cache_driver(self._session, self._decoder, "logits")
        driver.start(1)
        steps = pairwise([0, *np.cumsum(runs).tolist()])
        found = [driver.step(ids[None, start:end], np.ones((1, end), np.int64)) for start, end in steps]
        return np.stack([logits[0, -1].astype(np.float32) for logits in found])

    def _run(self, ids: np.ndarray) -> np.ndarray:
        decoder, n = self._decoder, len(ids)
        slots = max(n, decoder.buffer_least) if decoder.kv_form == "shared" else 0
        feeds = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, n), np.int64),
            "position_ids": np.arange(n)[None],
            **empty_states(decoder, 1, slots),
        }
        (logits,) = self._session.run(["logits"], {name: feeds[name] for name in self._inputs})
        return logits[0].astype(np.float32)


Reference = TorchReference | OriginalDecoderReference
