"""Min-k's cliff, the steepest drop of the sorted logits, without a sort.

With g the steepest (l_i - l_(i+1)) / i so far, a drop behind token i is steeper only if it exceeds i g. So none is
between the tokens of an interval of that length below token i. A few jumps over such intervals, ever longer, pass over a
whole vocabulary.
"""

from __future__ import annotations

import numpy as np

from topw_deploy.export.tail.candidates import Candidates
from topw_deploy.export.tail.inputs import LARGEST
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import steepest
from topw_deploy.export.tail.rules.statistics import Vocabulary, count_of, largest_of, over_blocks

JUMPS = 6
"""Rows of language models need at most three, and two more if a mask wrote large negative numbers into the logits."""


@scope
def cliff(op: Ops, words: Vocabulary, candidates: Candidates) -> Tensor:
    """The number of tokens before the steepest drop, of the first such drops: float32 [batch, 1]."""
    least, zero = op.constant(-LARGEST), op.constant(0.0)
    slope, size = steepest(op, candidates)
    slope, size = op.Max(slope, zero), op.Cast(size, to=1)
    here = op.Gather(candidates.logits, op.constant([candidates.count - 1], np.int64), axis=1)
    here = op.Max(here, least)
    length = count_of(op, op.GreaterOrEqual(words.logits, over_blocks(op, here)))
    for _ in range(JUMPS):
        within = op.GreaterOrEqual(words.logits, over_blocks(op, op.Sub(here, op.Mul(slope, length))))
        length = count_of(op, within)
        lowest = op.Neg(largest_of(op, op.Where(within, op.Neg(words.logits), op.constant(-np.inf))))
        following = largest_of(op, op.Where(within, op.constant(-np.inf), words.logits))
        drop = op.Where(op.GreaterOrEqual(following, least), op.Div(op.Sub(lowest, following), length), zero)
        steeper = op.Greater(drop, slope)
        slope, size = op.Where(steeper, drop, slope), op.Where(steeper, length, size)
        here = op.Where(op.GreaterOrEqual(following, least), following, lowest)
    return size
