"""`python -m benchmarks.masks`: what structured output costs per token, without the model.

The vocabulary has 151,936 tokens: the bytes, and the most frequent words of installed packages and their beginnings.
Each text takes random tokens among the allowed ones until it ends, or for 300 tokens.
"""

from __future__ import annotations

import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, table
from topw_deploy.errors import GrammarError
from topw_deploy.runtime.guide import Guide, MaskLayout, compile_grammar, read_tokens
from topw_deploy.runtime.structured import read_constraint

SIZE = 151_936
PADDING = 290  # rows of the embedding without a token
TEXTS, TOKENS = 8, 300
FILES = 5_000
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "kind": {"enum": ["a", "b", "card"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "a JSON schema": {"json": PERSON},
    "any JSON object": {"json_object": True},
    "a date as an expression": {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"},
    "1,000 choices": {"choice": [f"choice {index * 7919}" for index in range(1000)]},
    "arithmetic in Lark": {"grammar": 'start: e\ne: t (("+" | "-") t)*\nt: /[0-9]{1,4}/ | "(" e ")"'},
    "hostile: `.*a.{20}b`": {"regex": ".*a.{20}b"},
    "hostile: a string of 5,000": {"regex": r"(\w|\s){10,5000}"},
}


def vocabulary() -> list[bytes]:
    """SIZE tokens; the last PADDING have no text."""
    pieces = [bytes([byte]) for byte in range(256)]
    seen = set(pieces)
    for piece in _frequent_texts():
        if len(pieces) == SIZE - PADDING:
            break
        if piece not in seen:
            seen.add(piece)
            pieces.append(piece)
    return pieces + [b""] * (SIZE - len(pieces))


def _frequent_texts() -> Iterator[bytes]:
    counts: Counter[str] = Counter()
    words = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s+")
    for path in islice(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"), FILES):
        counts.update(words.findall(path.read_text(encoding="utf-8", errors="ignore")[:200_000]))
    for word, _ in counts.most_common():
        data = word.encode()
        if len(data) < 40:
            yield from (data, data[: len(data) * 2 // 3], data[: len(data) // 2])
    yield from (f"#{index:x}".encode() for index in range(SIZE))


def step_times(guide: Guide, rng: np.random.Generator) -> list[float]:
    """Microseconds of processor time of each token: advancing, and the next mask."""
    found = []
    for _ in range(TOKENS):
        allowed = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        started = time.thread_time()
        ended = guide.take(token)
        found.append((time.thread_time() - started) * 1e6)
        if ended:
            break
    return found


def main() -> None:
    print(f"{machine()}; {SIZE:,} tokens\n")
    pieces = vocabulary()
    started = time.perf_counter()
    tokens, words = read_tokens(pieces, []), MaskLayout(pieces)
    print(f"reading the vocabulary: {time.perf_counter() - started:.2f} s\n")
    rows = []
    for name, stated in GRAMMARS.items():
        started = time.perf_counter()
        matcher = compile_grammar(read_constraint("structured_outputs", stated), tokens)
        compiled = time.perf_counter() - started
        steps: list[float] = []
        note = ""
        for seed in range(TEXTS):
            guide = Guide(matcher.deep_copy(), words, ())
            try:
                guide.start()
                steps += step_times(guide, np.random.default_rng(seed))
            except GrammarError:
                note = ", then refused"
        costs = [f"{found(steps):.0f}" for found in (statistics.median, statistics.fmean, max)] if steps else ["-"] * 3
        rows.append([name, f"{compiled * 1e3:.1f}", *costs[:2], costs[2] + note])
    print(table(["grammar", "compile, ms", "median, us", "mean", "worst"], rows))


if __name__ == "__main__":
    main()
