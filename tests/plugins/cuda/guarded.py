"""Run emulated kernels on arrays that end at an unreadable page, at any element-aligned start.

A read beyond an array kills the program: python guarded.py LIBRARY
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tests.support.kernel
from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import COLUMNS, STAGES, KernelTable
from tests.support.rows import rules_of
from tests.support.rule_rows import rule_case
from topw_deploy.sampling import TopWOptions

PAGE = mmap.PAGESIZE
NO_ACCESS = 0


class Guarded(EmulatedKernel):
    """Copies arrays to such places and back.

    spare: elements left before the page's end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.spare = 0
        self._libc = ctypes.CDLL(None)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._placed: list[tuple[np.ndarray, np.ndarray, mmap.mmap]] = []

    def place(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        pages = -(-(array.nbytes + self.spare * array.itemsize) // PAGE) + 1
        room = mmap.mmap(-1, pages * PAGE)
        memory = np.frombuffer(room, np.uint8)
        end = (pages - 1) * PAGE - self.spare * array.itemsize
        inside = memory[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
        inside[...] = array
        assert self._libc.mprotect(memory.ctypes.data + (pages - 1) * PAGE, PAGE, NO_ACCESS) == 0
        self._placed.append((array, inside, room))
        return int(inside.ctypes.data)

    def launch(self, *arguments: Any, **named: Any) -> None:
        assert self._placed
        super().launch(*arguments, **named)
        for array, inside, _ in self._placed:
            if array.flags.writeable:
                array[...] = inside
        self._placed.clear()


def edits_of(rng: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = rng.integers(0, vocab, (rows, 4))
    ids[:, 0] = vocab - 1
    return ids, np.full((rows, 4), 1.25), np.full((rows, 4), 0.5)


def main(path: Path) -> None:
    kernel, rng = Guarded(path), np.random.default_rng(3)
    tests.support.kernel.address = kernel.place
    stages, number = set[int](), 0
    for vocab in (1, 63, 65, 130, 1001, 1003, 4099):
        for dtype in (np.float32, np.float16, np.uint16):
            for metric, scale in (("uniform", 8.0), ("cosine", 0.3), ("mahalanobis", 2.0)):
                number += 1
                kernel.emulate(number, (64, 96, 32)[number % 3], 1 + number % 3)
                kernel.spare = number % 4
                numbers = (rng.standard_normal((3, vocab)) * scale).astype(np.float32)
                logits = (numbers.view(np.uint32) >> 16).astype(dtype) if dtype is np.uint16 else numbers.astype(dtype)
                columns = dict.fromkeys(COLUMNS, np.full(3, 0.5)) | {"beta": np.full(3, 2.0)}
                columns["geom_scale"] = np.array([1.0, 0.0, -1.0])
                table = None
                if metric != "uniform":
                    hidden = (24, 33, 136)[number % 3]
                    rows = rng.standard_normal((vocab, hidden)).astype((np.float32, np.float16)[number % 2])
                    table = KernelTable(rows, np.zeros(hidden, np.float32), np.ones(hidden, np.float32))
                options = TopWOptions(metric=metric, top_m=60)  # type: ignore[arg-type]
                edits = edits_of(rng, 3, vocab) if number % 2 else None
                words = rng.integers(-(2**31), 2**31, (3, (vocab + 31) // 32)).astype(np.int32) | 1
                allowed = words if number % 4 > 1 else None
                rules = rules_of([rule_case(rng, 1) for _ in range(3)]) if number % 3 else None
                found = kernel.sample(
                    logits, columns, options, table, edits, allowed=allowed, rules=rules, mass=True, keep_mask=True
                )
                stages |= set(found.reports["stage"].tolist())
    assert {STAGES[stage] for stage in stages} >= {"candidates", "geometry", "literal"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
