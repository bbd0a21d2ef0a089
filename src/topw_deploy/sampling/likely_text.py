"""The text on whose steps a model's median distance is measured (`likely_pairs`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topw_deploy.sampling.geometry import Ids

LIKELY_COLUMNS = 64
"""Tokens of each text, with the tokenizer's leading special tokens."""

PAGE = """The river had been rising since noon. By four o'clock it had covered the stepping stones below the mill, and
the children who crossed there on their way home from school were sent round by the bridge. Nobody was alarmed: it
rose every spring when the snow went, and every spring it fell again within a week. Old Martha, who had kept a record
of the height in chalk on the wall of her cellar for thirty-one years, said that it had been higher in eleven of them.

What was different this time was the sound. Water that runs over stones makes a bright, broken noise; this was one low
note, steady as an organ pipe, and it came from somewhere under the embankment. The engineer whom the county sent
listened to it for a long time. He measured 2.4 metres at the gauge, then 2.6 an hour later, wrote both numbers down,
and asked for sandbags.

To sort a list of records by two keys, sort by the second key first and then by the first, because the sort is stable:

def by_name_then_age(records):
    records = sorted(records, key=lambda r: r.age)
    return sorted(records, key=lambda r: r.name)

The same can be written with one key function that returns a tuple. If an exception is raised while a key is computed,
the list is left unchanged. The function returns None for an empty sequence and raises ValueError if the size of the
step is zero or negative.
"""
"""Prose and code."""


def start_and_body(ids: Sequence[int], special: Sequence[int], vocab_size: int) -> tuple[Ids, Ids]:
    """The leading special tokens of an encoded text and its other tokens, without ids outside the vocabulary.

    special: 1 for each special token of `ids`, else 0.
    """
    prefix = list(special).index(0) if 0 in special else 0
    tokens = np.asarray(ids, dtype=np.int64)
    start, body = tokens[:prefix], tokens[prefix:]
    return start[start < vocab_size], body[body < vocab_size]


def ends_of(start: Ids, body: Ids, longest: int) -> list[Ids]:
    """The first and the last tokens of `body`, each after `start`, with at most `longest` tokens; [] if none fit."""
    length = longest - len(start)
    if length < 1 or not len(body):
        return []
    ends = [body[:length], body[-length:]] if len(body) > length else [body]
    return [np.concatenate([start, end]) for end in ends]
