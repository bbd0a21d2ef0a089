"""The `portable` form where there is geometry: two branches, one after the other, around static shapes.

The first takes the pool and its certificate unless the candidates settle every row. The second takes distances unless
every row has its answer by then. With a dynamic batch NVIDIA's builder refuses nested branches, and branches whose
sides hand out different shapes (docs/contract/graph.md, section 8). So they are not nested, and the second takes the
pool from the logits again: little beside the distances, while handing it over would cost the fast path dummies of its
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from topw_deploy.export.tail.answer import Answer, answer_of, finish, merge, parts_of
from topw_deploy.export.tail.ops import Ops, Tensor
from topw_deploy.export.tail.rows import all_true
from topw_deploy.export.tail.spec import TailSpec


@dataclass(frozen=True)
class Stages:
    """What each stage records, each called once, inside its branch.

    fast: the answer where the candidates settle every row.
    pooled: the answer of candidates and pool, and bool [batch, 1] whether it is final.
    moved: the alternation's answer for all rows, marked as certified as told, bool [batch, 1].
    """

    fast: Callable[[], Answer]
    pooled: Callable[[], tuple[Answer, Tensor]]
    moved: Callable[[Tensor], Answer]


def in_stages(op: Ops, spec: TailSpec, settled: Tensor, stages: Stages, share: Tensor | None) -> list[Tensor]:
    """The node's outputs; `settled` is a bool scalar: whether the candidates settle every row."""

    def by_candidates() -> list[Tensor]:
        return [op.Identity(settled), *parts_of(stages.fast())]

    def by_pool() -> list[Tensor]:
        answer, final = stages.pooled()
        return [all_true(op, final), *parts_of(answer)]

    answered, *parts = op.branch(settled, by_candidates, by_pool)
    answer = answer_of(spec, parts)

    def by_distances() -> list[Tensor]:
        invalid = op.Less(answer.drawn.token, op.constant(0, np.int64))
        final = op.Or(answer.certified, invalid)
        mixed = merge(op, final, answer, stages.moved(answer.certified))
        return finish(op, spec, replace(mixed, certified=answer.certified), share)

    return op.branch(answered, lambda: finish(op, spec, answer, share), by_distances)
