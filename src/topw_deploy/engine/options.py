"""Checks of the engine's options, and the number of rows that follows from them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from topw_deploy.engine.batch import row_bytes
from topw_deploy.errors import ParameterError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import ALIGNMENT
from topw_deploy.runtime.parameters import is_boolean
from topw_deploy.runtime.session import Session
from topw_deploy.text import decimal_size, short_repr

WHEN_FULL = ("error", "wait")
MOST_ROWS = 1024
"""Maximum rows: the engine compares each prompt with the tokens of every row, and keeps random numbers for all rows."""
_REMEDIES = {
    "concat": "export it again without --kv concat, or use TopWModel.generate",
    "shared": "export the original checkpoint with topw-export, or use TopWModel.generate",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The checked options of an engine.

    rows: rows of the cache.
    length: maximum tokens of a row.
    queue: maximum number of waiting sequences.
    waits_if_full: whether `submit` waits if the queue is full.
    chunk: maximum tokens of a chunk.
    reuses_prefixes: `reuse_prefixes` of Engine.
    prefix_bytes, exact: those of Engine.
    """

    rows: int
    length: int
    queue: int
    waits_if_full: bool
    chunk: int
    reuses_prefixes: bool
    prefix_bytes: int
    exact: bool


def check_form(decoder: DecoderInfo, path: object) -> None:
    """Raises ParameterError unless the cache has the form `static`. path: of the export, for the message."""
    if decoder.kv_form != "static":
        raise ParameterError(
            f"the batching engine needs a cache of the form 'static', but {path} has {decoder.kv_form!r}; "
            f"{_REMEDIES.get(decoder.kv_form, 'use TopWModel.generate')}."
        )


def check_tensorrt(session: Session, decoder: DecoderInfo, options: EngineOptions) -> None:
    """Raises ParameterError for a TensorRT engine that was built for fewer rows, or that cannot bind single rows."""
    if session.most_rows is not None and options.rows > session.most_rows:
        raise ParameterError(
            f"max_batch is {options.rows}, but the TensorRT engine was built for {session.most_rows}; give at most "
            "that, or build it again with a higher --max-batch."
        )
    sizes = [state.row_bytes(max(options.length, decoder.buffer_least)) for state in decoder.states]
    unaligned = next((size for size in sizes if size % ALIGNMENT), None)
    if session.provider == "tensorrt" and options.rows > 1 and unaligned is not None:
        raise ParameterError(
            f"a row of a state takes {unaligned} bytes, which is not a multiple of {ALIGNMENT}, so TensorRT cannot "
            "read a prompt into one of several rows; give max_batch=1, or open the model with another provider."
        )


def read_options(
    decoder: DecoderInfo,
    most_columns: int | None,
    *,
    max_batch: int,
    max_length: int | None,
    kv_bytes: int | None,
    max_queue: int,
    when_full: str,
    prefill_budget: int,
    reuse_prefixes: bool,
    prefix_bytes: int,
    exact: bool,
) -> EngineOptions:
    """Check the options of `Engine`. most_columns: maximum tokens of a run; None for no bound.

    Raises ParameterError for an invalid option, or if `kv_bytes` has no room for a single row.
    """
    length = decoder.context_length if max_length is None else _read_size("max_length", max_length)
    if length > decoder.context_length:
        raise ParameterError(
            f"max_length is {length}, but the model's context holds {decoder.context_length}; give at most that.",
            "max_length",
        )
    rows = max_batch = _read_size("max_batch", max_batch)
    if kv_bytes is not None:
        bytes_per_row = row_bytes(decoder, max(length, decoder.buffer_least))
        kv_bytes = _read_size("kv_bytes", kv_bytes)
        fitting_rows = kv_bytes // max(bytes_per_row, 1)
        if not fitting_rows:
            raise ParameterError(
                f"kv_bytes is {decimal_size(kv_bytes)}, but a row of {length} tokens takes "
                f"{decimal_size(bytes_per_row)}; give more, or a smaller max_length.",
                "kv_bytes",
                "max_length",
            )
        rows = min(rows, fitting_rows)
    if rows > MOST_ROWS:
        raise ParameterError(
            f"max_batch is {max_batch}, but an engine has at most {MOST_ROWS} rows; give at most that, and a higher "
            "max_queue for sequences that wait.",
            "max_batch",
        )
    if when_full not in WHEN_FULL:
        raise ParameterError(f"when_full is {when_full!r}, but must be one of {', '.join(WHEN_FULL)}.", "when_full")
    chunk = _read_size("prefill_budget", prefill_budget)
    for most in (most_columns, decoder.most_columns):
        chunk = min(chunk, most or chunk)
    for name, value in (("reuse_prefixes", reuse_prefixes), ("exact", exact)):
        if not isinstance(value, bool):
            raise ParameterError(f"{name} is {value!r}, but must be True or False.", name)
    return EngineOptions(
        rows,
        length,
        queue=_read_size("max_queue", max_queue, 0),
        waits_if_full=when_full == "wait",
        chunk=chunk,
        reuses_prefixes=reuse_prefixes,
        prefix_bytes=_read_size("prefix_bytes", prefix_bytes, 0),
        exact=exact,
    )


def _read_size(name: str, value: object, least: int = 1) -> int:
    """Returns the option as an int. Raises ParameterError unless it is an integer >= `least`."""
    try:
        size = None if is_boolean(value) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None or size < least:
        raise ParameterError(f"{name} is {short_repr(value)}, but must be an integer >= {least}.", name)
    return size
