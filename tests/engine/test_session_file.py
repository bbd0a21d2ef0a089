"""Files of saved sessions: their format, the ways in which a file can be wrong, and interrupted writes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from topw_deploy.engine.session_file import SessionForm, SessionInfo, read_session, write_session
from topw_deploy.errors import ParameterError, SessionFileError
from topw_deploy.manifest import State


def state(name: str, dtype: str, *shape: int) -> State:
    return State(layer=0, kind="full", past=name, present=f"new {name}", dtype=dtype, shape=shape)


STATES = (
    state("flags", "bool", 3),
    state("last", "int64", 1, 2),
    state("mean", "float16", 5, 3),
    state("keys", "float", 2, 0, 3),
    state("latent", "bfloat16", 1, 0, 5),
    state("codes", "uint8", 0, 7),
)
FORM = SessionForm("ab" * 32, "a model", STATES, length=9, vocabulary=50, chunk=0)
TOKENS = np.array([3, 1, 49, 0, 7])


def states_of(tokens: int, seed: int = 0) -> list[np.ndarray]:
    """States of so many tokens, as `Buffers.snapshot` returns them."""
    rng, found = np.random.default_rng(seed), []
    types = {"bool": np.bool_, "int64": np.int64, "float16": np.float16, "float": np.float32, "uint8": np.uint8}
    for one in STATES:
        values = rng.integers(0, 100, one.sized(tokens))
        array = values.astype(np.uint16) if one.dtype == "bfloat16" else values.astype(types[one.dtype])
        parts = int(np.prod(one.shape[: one.shape.index(0)])) if one.grows else 1
        found.append(array.reshape(-1).view(np.uint8).reshape(parts, -1))
    return found


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_session(tmp_path / "session", FORM, TOKENS, states_of(5))
    return tmp_path / "session"


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    tokens, states, info = read_session(path, FORM)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == TOKENS.tolist()
    assert [one.tolist() for one in states] == [one.tolist() for one in states_of(5)]
    assert info == SessionInfo(5, path.stat().st_size)


def test_only_the_states_of_the_given_tokens_are_written(path: Path, tmp_path: Path) -> None:
    written = write_session(tmp_path / "three", FORM, TOKENS[:3], states_of(5))
    assert written == SessionInfo(3, (tmp_path / "three").stat().st_size)
    for found, whole, one in zip(read_session(tmp_path / "three", FORM)[1], states_of(5), STATES, strict=True):
        size = whole.shape[1] // 5 * 3 if one.grows else whole.shape[1]
        assert found.tolist() == whole[:, :size].tolist()


def test_the_safetensors_library_reads_the_file(path: Path) -> None:
    """It has no NumPy type for bfloat16, so the test reads only the shape of that tensor."""
    with safe_open(path, framework="np") as stream:
        assert stream.metadata() == {
            "format": "topw-session", "version": "1", "manifest": "ab" * 32, "model": "a model", "chunk": "0",
            "sha256": hashlib.sha256(header_of(path.read_bytes())[1]).hexdigest(),
        }  # fmt: skip
        assert stream.get_tensor("tokens").tolist() == TOKENS.tolist()
        keys = stream.get_tensor("keys")
        assert (keys.shape, keys.dtype, keys.tobytes()) == ((2, 5, 3), np.float32, states_of(5)[3].tobytes())
        assert stream.get_slice("latent").get_shape() == [1, 5, 5]


def test_every_tensor_is_aligned(path: Path) -> None:
    content = path.read_bytes()
    header, data = header_of(content)
    sizes = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
    del header["__metadata__"]
    assert all(
        (len(content) - len(data) + one["data_offsets"][0]) % sizes[one["dtype"]] == 0 for one in header.values()
    )


def set_fields(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


def remove(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.pop(name)


# Entries that are wrong in themselves: tests/attacks/test_checkpoints.py, of the same reader.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no metadata": (remove("__metadata__"), "it is not a saved session"),
    "another format": (set_fields("__metadata__", format="pt"), "it is not a saved session"),
    "a newer version": (set_fields("__metadata__", version="2"), "it is not a saved session"),
    "another export": (set_fields("__metadata__", manifest="cd" * 32, model="other"),
                       r"another export \('other', manifest cdcdcdcdcdcdcdcd…\), not to this one \('a model'"),
    "no digest": (set_fields("__metadata__", sha256=None), "its data has SHA-256 .*, its header says None"),
    "another digest": (set_fields("__metadata__", sha256="0" * 64), "its data has SHA-256 .*, its header says 0000"),
    "no tokens": (remove("tokens"), "it has 0 tokens"),
    "tokens of another type": (set_fields("tokens", dtype="U64"), "its tensor 'tokens' is .*'U64'.*, not .*'I64'"),
    "zero tokens": (set_fields("tokens", shape=[0], data_offsets=[0, 0]), "it has 0 tokens, but a slot of the engine"),
    "too many tokens": (set_fields("tokens", shape=[10], data_offsets=[0, 80]), r"10 tokens, .* 1 to 9 \(max_length\)"),
    "2^60 tokens": (set_fields("tokens", shape=[1 << 60], data_offsets=[0, 1 << 63]), "<= 9223372036854775807"),
    "a state less": (remove("mean"), "its tensor 'mean' is None"),
    "a state more": (lambda header: header.update(other=header["codes"]), "its tensor 'other' is .*, not None"),
    "another type": (set_fields("mean", dtype="BF16"), r"its tensor 'mean' is .*'BF16'.*, not .*'F16'"),
    "another shape": (set_fields("keys", shape=[3, 5, 2]), r"'keys' is .*\(3, 5, 2\).*, not .*\(2, 5, 3\)"),
    "overlapping offsets": (set_fields("latent", data_offsets=[0, 50]), r"its tensor 'latent' is .*\(0, 50\)"),
    "a gap": (set_fields("codes", data_offsets=[1 << 30, (1 << 30) + 35]), "its tensor 'codes' is .*1073741824"),
    "no entry": (lambda header: header.update(keys=7), "'keys': "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_header_is_refused_with_its_reason(path: Path, case: str) -> None:
    edit, reason = WRONG[case]
    header, data = header_of(path.read_bytes())
    edit(header)
    path.write_bytes(file_of(header, data))
    with pytest.raises(SessionFileError, match=rf"/session' cannot be loaded: .*{reason}.*; save the session again\.$"):
        read_session(path, FORM)


def test_a_header_above_the_limit_is_refused_before_it_is_read(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", (16 << 20) + 1))
        stream.truncate(1 << 30)  # sparse
    with pytest.raises(SessionFileError, match="its header claims 16777217 bytes"):
        read_session(path, FORM)


def file_with_digest(header: dict[str, Any], data: bytes) -> bytes:
    """A file with this header and data, and the correct digest."""
    header["__metadata__"]["sha256"] = hashlib.sha256(data).hexdigest()
    return file_of(header, data)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokens", struct.pack("<q", 50), "it has the token 50, but the vocabulary has 50 tokens"),
        ("tokens", struct.pack("<q", -1), "it has the token -1, but the vocabulary has 50 tokens"),
        ("keys", struct.pack("<f", np.nan), "its state keys is not finite"),
        ("keys", struct.pack("<f", -np.inf), "its state keys is not finite"),
        ("mean", struct.pack("<e", np.inf), "its state mean is not finite"),
        ("latent", struct.pack("<H", 0x7F80), "its state latent is not finite"),
        ("latent", struct.pack("<H", 0xFFC1), "its state latent is not finite"),
        ("flags", b"\x02", "its state flags is not finite"),
    ],
)
def test_tokens_and_states_that_no_engine_writes_are_refused(path: Path, name: str, value: bytes, reason: str) -> None:
    header, data = header_of(path.read_bytes())
    begin = header[name]["data_offsets"][0]
    path.write_bytes(file_with_digest(header, data[:begin] + value + data[begin + len(value) :]))
    with pytest.raises(SessionFileError, match=reason):
        read_session(path, FORM)


def test_a_file_cut_at_any_byte_any_changed_byte_of_data_and_a_byte_more_are_refused(path: Path) -> None:
    content = path.read_bytes()
    start, sizes = len(content) - len(header_of(content)[1]), "bytes of data, but its tensors"
    cut = [(content[:size], "it has|its header claims" if size < start else sizes) for size in range(len(content))]
    flipped = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(start, len(content))]
    for other, reason in (*cut, *((each, "its data has SHA-256") for each in flipped), (content + b"\0", sizes)):
        path.write_bytes(other)
        with pytest.raises(SessionFileError, match=reason):
            read_session(path, FORM)


def test_an_exact_engine_takes_files_with_its_own_chunks_only(path: Path, tmp_path: Path) -> None:
    exact = SessionForm(FORM.manifest, FORM.model, STATES, 9, 50, chunk=4)
    with pytest.raises(SessionFileError, match="not saved by an engine with exact=True and chunks of 4 tokens"):
        read_session(path, exact)
    write_session(path, exact, TOKENS, states_of(5))
    with pytest.raises(SessionFileError, match="it has 5 tokens, which is not a multiple of 4"):
        read_session(path, exact)
    write_session(path, exact, TOKENS[:4], states_of(5))
    assert len(read_session(path, exact)[0]) == len(read_session(path, FORM)[0]) == 4


def test_only_regular_files_are_read_and_replaced(path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    before = path.read_bytes()
    for name, kind in (("folder", "a folder"), ("link", "a symbolic link"), ("pipe", "a named pipe")):
        with pytest.raises(SessionFileError, match=rf"/{name} is {kind}, not a regular file"):
            read_session(tmp_path / name, FORM)
        with pytest.raises(SessionFileError, match=rf"/{name} is {kind}, which is not replaced"):
            write_session(tmp_path / name, FORM, TOKENS, states_of(5, 1))
    for place in ("missing/session", "session/session", "a\0b"):
        with pytest.raises(SessionFileError, match=r"cannot be read|cannot be loaded"):
            read_session(tmp_path / place, FORM)
        with pytest.raises(SessionFileError, match="cannot be written"):
            write_session(tmp_path / place, FORM, TOKENS, states_of(5, 1))
    with pytest.raises(ParameterError, match="path is 3, but must be the path of a file"):
        read_session(3, FORM)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "session"]


def test_states_that_are_not_finite_are_not_saved(path: Path) -> None:
    states = states_of(5)
    states[3].view(np.float32)[0, 2] = np.nan
    before = path.read_bytes()
    with pytest.raises(SessionFileError, match="its state keys is not finite"):
        write_session(path, FORM, TOKENS, states)
    assert path.read_bytes() == before
