"""Answers tokenizers_stand_in.cpp with the tokenizers package."""

from __future__ import annotations

import struct
import sys
from typing import BinaryIO

from tokenizers import Tokenizer

_CALL = struct.Struct("=cIQ")
_REFUSED = struct.pack("=Q", 2**64 - 1)


def answer(tokenizer: Tokenizer, which: bytes, flag: int, data: bytes) -> bytes:
    if which == b"e":
        ids = tokenizer.encode(data.decode(), add_special_tokens=bool(flag)).ids
        return struct.pack(f"={len(ids)}i", *ids)
    if which == b"d":
        ids = struct.unpack(f"={len(data) // 4}I", data)
        return tokenizer.decode(ids, skip_special_tokens=bool(flag)).encode()
    if which == b"i":
        return (tokenizer.id_to_token(*struct.unpack("=I", data)) or "").encode()
    token = tokenizer.token_to_id(data.decode())
    return struct.pack("=i", -1 if token is None else token)


def serve(calls: BinaryIO, answers: BinaryIO) -> None:
    tokenizer = None
    while head := calls.read(_CALL.size):
        which, flag, size = _CALL.unpack(head)
        data = calls.read(size)
        if which == b"n":
            try:
                tokenizer, result = Tokenizer.from_str(data.decode()), b""
            except Exception:  # noqa: BLE001  # the library raises bare Exception
                answers.write(_REFUSED)
                answers.flush()
                continue
        else:
            assert tokenizer is not None
            result = answer(tokenizer, which, flag, data)
        answers.write(struct.pack("=Q", len(result)) + result)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
