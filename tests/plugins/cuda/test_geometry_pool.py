"""The pool of the emulated kernels has the best tokens by (logit descending, id ascending).

With lam = 0 and geom_scale = 0 a row keeps its pool, unless weights vanish in the sum; with init_top_p < 1 it is
uncertified, so the second launch answers it.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import STAGES
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.reference import candidate_pool

WHOLE = {"lam": 0.0, "beta": 1.0, "geom_scale": 0.0, "init_top_p": 0.5, "temperature": 20.0, "uniform": 0.5}


def pools(kernel: EmulatedKernel, logits: np.ndarray, top_m: int, edits: tuple | None = None) -> list[np.ndarray]:
    options = TopWOptions(top_m=top_m, metric="uniform")
    found = kernel.sample(logits, WHOLE, options, None, edits, keep_mask=True)
    assert found.keep_mask is not None
    assert {STAGES[stage] for stage in found.reports["stage"]} <= {"geometry", "pool", "candidates"}
    return [np.flatnonzero(mask) for mask in found.keep_mask]


def rows(vocab: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(vocab).astype(np.float32)
    few = np.full(vocab, -np.inf, np.float32)
    few[rng.permutation(vocab)[:70]] = normal[:70]
    crowded = normal.copy()
    crowded[vocab // 2 : vocab // 2 + 900] += 9
    heavy = np.clip(rng.standard_t(1.5, vocab), -99, 99).astype(np.float32)
    return {
        "by chance": normal,
        "descending": -np.sort(-normal),
        "ascending": np.sort(normal),
        "crowded": crowded,
        "few": few,
        "tied": (np.round(normal * 4) / 4).astype(np.float32),
        "heavy": heavy,
        "banned": np.where(rng.random(vocab) < 0.9, np.float32(-99), normal),
        "equal": np.full(vocab, 2.5, np.float32),
    }


@pytest.mark.parametrize(
    ("vocab", "top_m"),
    [
        (1, 1), (63, 5), (64, 64), (200, 1200), (1000, 17), (1000, 1000), (3001, 1200), (5000, 3), (9000, 4096),
        (32_000, 1200), (50_257, 1200), (100_000, 1200),
    ],
)  # fmt: skip
def test_the_pool_is_the_best_tokens_however_the_logits_lie(kernel: EmulatedKernel, vocab: int, top_m: int) -> None:
    for n, (name, row) in enumerate(rows(vocab, vocab).items()):
        kernel.emulate(seed=n + 1, threads=(64, 96, 128)[n % 3], blocks=1)
        wanted = np.sort(candidate_pool(row.astype(np.float64), top_m)[0])
        assert np.array_equal(pools(kernel, row[None], top_m)[0], wanted), name


def test_the_short_types_of_logits_are_taken_as_float32_ones(kernel: EmulatedKernel) -> None:
    for vocab in (3001, 20_000):
        drawn = np.stack(list(rows(vocab, 1).values())[:4])
        half = drawn.astype(np.float16)
        bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        for given, meant in ((half, half.astype(np.float32)), (bits, (bits.astype(np.uint32) << 16).view(np.float32))):
            for found, row in zip(pools(kernel, given, 300), meant, strict=True):
                assert np.array_equal(found, np.sort(candidate_pool(row.astype(np.float64), 300)[0]))
