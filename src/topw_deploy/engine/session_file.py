"""Files of saved sessions: tokens and the states after them, as safetensors.

The tensor `tokens` is int64 [n]. Each state has the name of its graph input and the shape of a slot of n tokens. Bytes
are little-endian and have no gaps. `__metadata__` has

format: "topw-session".
version: version of the format.
manifest: SHA-256 of the export's manifest.
model: the model's id, for messages.
chunk: see `SessionForm`.
sha256: SHA-256 of all tensors' bytes, in the order of the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import ParameterError, SessionFileError
from topw_deploy.folders import NotRegularError, atomic_file, kind_of, open_regular
from topw_deploy.manifest import DecoderManifest, State
from topw_deploy.runtime.cache.buffers import Layout, allocate_zeros
from topw_deploy.safetensors_header import ELEMENT_BYTES, METADATA, Entry, read_entry, read_header
from topw_deploy.text import short_repr

FORMAT, VERSION = "topw-session", "1"
TOKENS = "tokens"
_MAX_HEADER_BYTES = 16 << 20  # manifests have the same bound
_EXPONENT_BITS = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A saved session.

    tokens: number of tokens whose states it holds.
    bytes: size of the file.
    """

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SessionForm:
    """The form of the sessions that an engine saves and accepts.

    manifest: SHA-256 of the export's manifest.
    model: the model's id.
    states: the states of the cache, in the order of its layout.
    length: maximum tokens of a session.
    vocabulary: number of token ids.
    chunk: an exact engine reuses tokens only up to multiples of this; 0 if the engine is not exact.
    """

    manifest: str
    model: str
    states: tuple[State, ...]
    length: int
    vocabulary: int
    chunk: int

    @property
    def metadata(self) -> dict[str, str]:
        """What a file's metadata must state."""
        return {"format": FORMAT, "version": VERSION, "manifest": self.manifest, "chunk": str(self.chunk)}

    def tensors(self, tokens: int) -> dict[str, Entry]:
        """The tensors of a session, in the order of the file. Wider elements come first, which aligns all tensors."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {TOKENS: ("I64", (tokens,))}
        shapes |= {state.past: (ELEMENT_TYPES[state.dtype].safetensors, state.sized(tokens)) for state in self.states}
        entries, end = {}, 0
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -ELEMENT_BYTES[item[1][0]]):
            begin, end = end, end + math.prod(shape) * ELEMENT_BYTES[dtype]
            entries[name] = Entry(dtype, shape, (begin, end))
        return entries


def session_form(manifest: DecoderManifest, length: int, chunk: int) -> SessionForm:
    """The form of the sessions of an export, and of an engine with these options."""
    return SessionForm(
        # Equals the SHA-256 of manifest.json, unless another version of this package wrote that file.
        manifest=hashlib.sha256(manifest.to_json().encode("utf-8")).hexdigest(),
        model=manifest.source.get("id", ""),
        states=tuple(Layout(manifest.decoder).states),
        length=length,
        vocabulary=manifest.sampler.vocab_size,
        chunk=chunk,
    )


def write_session(path: str | Path, form: SessionForm, tokens: np.ndarray, states: Sequence[np.ndarray]) -> SessionInfo:
    """Write `tokens`, int64 [n], and the states after them. A file at `path` is replaced atomically; after an error it
    is unchanged.

    states: the bytes of each state of the form, of n or more tokens: uint8 [runs of tokens, bytes of a run].

    Raises SessionFileError if `path` cannot be written or states are not finite, ParameterError if it is not a path.
    """
    count = len(tokens)
    raw = {TOKENS: tokens.astype("<i8").view(np.uint8)}
    for state, array in zip(form.states, states, strict=True):
        size = state.row_bytes(count) // len(array)
        raw[state.past] = np.ascontiguousarray(array[:, :size]).reshape(-1)
    tensors = form.tensors(count)
    digest = hashlib.sha256()
    for name, entry in tensors.items():
        if not _has_valid_values(entry.dtype, raw[name]):
            raise SessionFileError(f"the session is not saved: its state {name} is not finite; generate again.")
        digest.update(raw[name].data)
    metadata = {**form.metadata, "model": form.model, "sha256": digest.hexdigest()}
    text = msgspec.json.encode({METADATA: metadata, **tensors})
    text += b" " * (-len(text) % 8)  # aligns the data
    header = struct.pack("<Q", len(text)) + text
    path = _check_path(path)
    try:
        if os.path.lexists(path) and not stat.S_ISREG(mode := path.lstat().st_mode):
            raise NotRegularError(kind_of(mode), path)
        with atomic_file(path) as stream:
            stream.write(header)
            for name in tensors:
                stream.write(raw[name].data)
    except NotRegularError as error:
        raise SessionFileError(f"{path} is {error.kind}, which is not replaced; choose another name.") from None
    except (OSError, ValueError) as error:  # ValueError: no system call accepts such a path
        why = getattr(error, "strerror", None) or error
        raise SessionFileError(f"{str(path)!r} cannot be written ({why}); choose another place.") from None
    return SessionInfo(count, len(header) + sum(map(len, raw.values())))


def read_session(path: str | Path, form: SessionForm) -> tuple[np.ndarray, list[np.ndarray], SessionInfo]:
    """Read a session. Returns (tokens int64 [n], states as `write_session` takes them, info).

    Checks the whole file; checks sizes before it allocates memory for them.

    Raises SessionFileError if the file cannot be read, is damaged, does not fit the engine, or has states that are not
    finite, and ParameterError if `path` is not a path.
    """
    path = _check_path(path)
    try:
        with open_regular(path) as stream:
            return _read_stream(stream, form)
    except NotRegularError as error:
        raise SessionFileError(f"{path} is {error.kind}, not a regular file; name the file itself.") from None
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read: {error.strerror or error}; name another file.") from None
    except ValueError as error:
        raise SessionFileError(f"{str(path)!r} cannot be loaded: {error}; save the session again.") from None


def _check_path(given: object) -> Path:
    """Returns the path. Raises ParameterError if `given` is not a path."""
    if not isinstance(given, (str, os.PathLike)):
        raise ParameterError(f"path is {short_repr(given)}, but must be the path of a file.", "path")
    return Path(given)


def _read_stream(stream: BinaryIO, form: SessionForm) -> tuple[np.ndarray, list[np.ndarray], SessionInfo]:
    size = os.fstat(stream.fileno()).st_size
    header, start = read_header(stream, size, _MAX_HEADER_BYTES)
    metadata = header.pop(METADATA, None)
    _check_metadata(metadata, form)
    entries = {name: read_entry(name, entry) for name, entry in header.items()}
    count = entries[TOKENS].shape[0] if TOKENS in entries and entries[TOKENS].shape else 0
    if not 1 <= count <= form.length:
        raise ValueError(f"it has {count} tokens, but a slot of the engine has 1 to {form.length} (max_length)")
    if form.chunk and count % form.chunk:
        raise ValueError(f"it has {count} tokens, which is not a multiple of {form.chunk}")
    tensors = form.tensors(count)
    for name in (*tensors, *entries):
        if entries.get(name) != tensors.get(name):
            raise ValueError(f"its tensor {name!r:.60} is {entries.get(name)!s:.120}, not {tensors.get(name)}")
    end = max(entry.end for entry in tensors.values())
    if size - start != end:
        raise ValueError(f"it has {size - start} bytes of data, but its tensors have {end}")
    raw, digest = {}, hashlib.sha256()
    for name, entry in tensors.items():
        data = raw[name] = allocate_zeros("the session", (entry.end - entry.begin,), np.uint8)
        if stream.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise ValueError("it became shorter while it was read")
        digest.update(data.data)
    if digest.hexdigest() != metadata.get("sha256"):
        stated = f"{metadata.get('sha256')!s:.16}"
        raise ValueError(f"its data has SHA-256 {digest.hexdigest()[:16]}…, its header says {stated}…")
    tokens = raw[TOKENS].view("<i8").astype(np.int64)
    unknown = tokens[(tokens < 0) | (tokens >= form.vocabulary)]
    if len(unknown):
        raise ValueError(f"it has the token {unknown[0]}, but the vocabulary has {form.vocabulary} tokens")
    for name, data in raw.items():
        if not _has_valid_values(tensors[name].dtype, data):
            raise ValueError(f"its state {name} is not finite")
    states = []
    for state in form.states:  # one run of tokens per head, for example
        runs = math.prod(state.shape[: state.shape.index(0)]) if state.grows else 1
        states.append(raw[state.past].reshape(runs, -1))
    return tokens, states, SessionInfo(count, size)


def _check_metadata(metadata: Any, form: SessionForm) -> None:
    """Raises ValueError unless a file's metadata are those of the form."""
    if not isinstance(metadata, dict) or (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise ValueError("it is not a saved session that this topw_deploy reads")
    if metadata.get("manifest") != form.manifest:
        raise ValueError(
            f"it belongs to another export ({metadata.get('model')!r:.60}, manifest "
            f"{metadata.get('manifest')!s:.16}…), not to this one ({form.model!r:.60}, manifest {form.manifest:.16}…)"
        )
    if form.chunk and metadata.get("chunk") != form.metadata["chunk"]:
        raise ValueError(
            f"it was not saved by an engine with exact=True and chunks of {form.chunk} tokens, as this one is"
        )


def _has_valid_values(dtype: str, raw: np.ndarray) -> bool:
    """Whether all values are finite, or, for booleans, 0 or 1. raw: uint8 [bytes]."""
    if dtype == "BOOL":
        return bool((raw <= 1).all())
    if dtype not in _EXPONENT_BITS:
        return True
    unsigned, exponent = _EXPONENT_BITS[dtype]
    return bool(((raw.view(unsigned) & unsigned(exponent)) != exponent).all())
