"""Min-k's cliff, the steepest drop of the sorted logits, without a sort.

Let g be the steepest (l_i - l_(i+1)) / i so far. A drop after token i is steeper only if it exceeds i g, so there is no
steeper drop within an interval of that length below token i. Each jump passes over such an interval. The intervals
grow, so a few jumps pass over a whole vocabulary.
"""

from __future__ import annotations

import numpy as np

from topw_deploy.export.tail.inputs import LARGEST
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import List, steepest
from topw_deploy.export.tail.rules.statistics import Vocabulary, count_of, largest_of, over_blocks

JUMPS = 3
"""Jumps after the 3840 largest logits. Logits masked by large negative numbers need two."""


@scope
def cliff(op: Ops, words: Vocabulary, best: List) -> Tensor:
    """The number of tokens before the steepest drop, the first one among equals: float32 [batch, 1]."""
    least, zero = op.constant(-LARGEST), op.constant(0.0)
    slope, size = steepest(op, best.logits)
    slope, size = op.Max(slope, zero), op.Cast(size, to=1)
    here = op.Max(best.last, least)
    length = count_of(op, op.GreaterOrEqual(words.logits, over_blocks(op, here)))
    for _ in range(JUMPS):
        within = op.GreaterOrEqual(words.logits, over_blocks(op, op.Sub(here, op.Mul(slope, length))))
        length = count_of(op, within)
        lowest = op.Neg(largest_of(op, op.Where(within, op.Neg(words.logits), op.constant(-np.inf))))
        following = largest_of(op, op.Where(within, op.constant(-np.inf), words.logits))
        more = op.GreaterOrEqual(following, least)
        drop = op.Where(more, op.Div(op.Sub(lowest, following), length), zero)
        steeper = op.Greater(drop, slope)
        slope, size = op.Where(steeper, drop, slope), op.Where(steeper, length, size)
        here = op.Where(more, following, lowest)
    return size
