"""Word problems about sums of 2- to 4-digit numbers, with step-by-step answers, in GSM8K's format.

A step adds two numbers column by column, from the ones, as `a+b+carry=sum` with a two-digit sum, and then states the
result. A problem's numbers decide whether it is for training or held out (`is_held_out`); held-out ones are never
trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks.sums.words import EVENTS, HERS, HIS, KINDS, PLACES, THINGS, TIMES

HELD_OUT_OF_100 = 10
NEW_TOKENS = 184  # the longest true answer has about 160 tokens, the model's context 256
LENGTHS = ((2, 1), (3, 2), (4, 1))  # (digits, weight)
KINDS_OF_PROBLEM = ("two", "three", "more")
_ANSWER = re.compile(r"#### (\d+)")


@dataclass(frozen=True)
class Problem:
    """A problem with GSM8K's fields.

    answer: ends in `#### total`.
    """

    question: str
    answer: str
    total: int

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def completion(self) -> str:
        return f" {self.answer}"


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether problems with these numbers, in this order, are only for tests."""
    return zlib.crc32(",".join(map(str, numbers)).encode()) % 100 < HELD_OUT_OF_100


def problems(seed: int, *, held_out: bool = False, kinds: Sequence[str] = KINDS_OF_PROBLEM) -> Iterator[Problem]:
    """Yield problems without end; they depend only on the arguments."""
    rng = random.Random(f"{seed}/{held_out}")
    while True:
        kind = rng.choice(kinds)
        numbers = [_number(rng) for _ in range(3 if kind == "three" else 2)]
        if is_held_out(numbers) == held_out:
            yield _WRITERS[kind](rng, numbers)


def stated_total(text: str) -> int | None:
    """The number after the first `####`, or None: GSM8K's strict match."""
    found = _ANSWER.search(text)
    return int(found.group(1)) if found else None


def columns(a: int, b: int) -> str:
    """The sums of the columns, from the ones: `columns(47, 85)` is "7+5+0=12 4+8+1=13"."""
    parts: list[str] = []
    carry = 0
    for _ in range(max(len(str(a)), len(str(b)))):
        (a, low), (b, other) = divmod(a, 10), divmod(b, 10)
        found = low + other + carry
        parts.append(f"{low}+{other}+{carry}={found:02d}")
        carry = found // 10
    return " ".join(parts)


def _number(rng: random.Random) -> int:
    digits = rng.choices([n for n, _ in LENGTHS], [weight for _, weight in LENGTHS])[0]
    return rng.randrange(10 ** (digits - 1), 10**digits)


@dataclass(frozen=True)
class _Cast:
    """The people and things of a problem."""

    name: str
    other: str
    they: str
    things: str
    place: str

    @staticmethod
    def drawn(rng: random.Random) -> _Cast:
        names, they = rng.choice([(HERS, "she"), (HIS, "he")])
        name = rng.choice(names)
        other = rng.choice([n for n in (*HERS, *HIS) if n != name])
        things = rng.choice(THINGS)
        if rng.random() < 0.3:
            things = f"{rng.choice(KINDS)} {things}"
        return _Cast(name, other, they, things, rng.choice(PLACES))


def _gathering_problem(rng: random.Random, numbers: Sequence[int]) -> Problem:
    """A person has some things, and gets more once or twice."""
    cast = c = _Cast.drawn(rng)
    told = [
        rng.choice(
            (
                f"{c.name} has {numbers[0]} {c.things}.",
                f"{c.name} keeps {numbers[0]} {c.things} in {c.place}.",
                f"There are {numbers[0]} {c.things} in {c.place}. They belong to {c.name}.",
                f"{rng.choice(TIMES)} {c.name} had {numbers[0]} {c.things}.",
                f"At first {c.name} had {numbers[0]} {c.things}.",
            )
        )
    ]
    for number in numbers[1:]:
        event, time = rng.choice(EVENTS), rng.choice(TIMES)
        told.append(
            rng.choice(
                (
                    f"{time} {c.they} {event} {number} {c.things}.",
                    f"Then {c.they} {event} {number} more.",
                    f"{c.other} gave {c.name} {number} {c.things}.",
                    f"{time} {c.other} brought {number} more from {rng.choice(PLACES)}.",
                )
            )
        )
    asked = rng.choice(
        (
            f"How many {c.things} does {c.name} have now?",
            f"How many {c.things} does {c.they} have in all?",
            f"What is the total number of {c.things}?",
            "How many are there altogether?",
        )
    )
    return _problem_with_steps(rng, cast, [*_insert_distractor(rng, cast, told), asked], numbers)


def _comparison_problem(rng: random.Random, numbers: Sequence[int]) -> Problem:
    """One person has more things than another; the question is how many they have together."""
    cast = _Cast.drawn(rng)
    c, (a, b) = cast, numbers
    told = [f"{c.name} has {a} {c.things}.", f"{c.other} has {b} more {c.things} than {c.name}."]
    asked = rng.choice(
        (
            f"How many {c.things} do {c.name} and {c.other} have together?",
            f"How many {c.things} do they have together?",
            "How many do both of them have?",
        )
    )
    return _problem_with_steps(rng, cast, [*_insert_distractor(rng, cast, told), asked], (a, b, a), together=True)


def _insert_distractor(rng: random.Random, cast: _Cast, told: list[str]) -> list[str]:
    """Add a sentence with an irrelevant number to `told` in one of five cases."""
    if rng.random() < 0.2:
        number = rng.randrange(11, 99)
        extra = (
            f"{cast.name} is {number} years old.",
            f"It took {number} minutes.",
            f"{cast.other} lives {number} miles away.",
            f"This was {number} days ago.",
        )
        told.insert(rng.randrange(1, len(told) + 1), rng.choice(extra))
    return told


def _problem_with_steps(
    rng: random.Random, cast: _Cast, told: Sequence[str], numbers: Sequence[int], *, together: bool = False
) -> Problem:
    c, total, lines = cast, numbers[0], []
    for step, number in enumerate(numbers[1:]):
        result = total + number
        lines.append(f"{rng.choice(_step_openings(c, step, together))} {total}+{number}: {columns(total, number)}")
        lines[-1] += rng.choice((f" so {result}", f" which is {result}", f" that makes {result}", f" giving {result}"))
        lines[-1] += rng.choice((".", f" {c.things}."))
        total = result
    who = (f"{c.name} and {c.other} have", "They have") if together else (f"{c.name} has", f"{c.they.title()} has")
    lines.append(
        rng.choice(
            (
                f"{rng.choice(who)} {total} {c.things}.",
                f"The answer is {total}.",
                f"In all there are {total} {c.things}.",
                f"The total is {total} {c.things}.",
            )
        )
    )
    return Problem(" ".join(told), "\n".join([*lines, f"#### {total}"]), total)


def _step_openings(cast: _Cast, step: int, together: bool) -> tuple[str, ...]:
    c = cast
    if step == 0 and together:
        return (f"{c.other} has", f"First, {c.other} has", f"The {c.things} of {c.other}:", f"Find what {c.other} has:")
    if step == 0:
        return ("First add", "Start with", f"{c.name} has", f"Add the {c.things}:", "We begin with", "The first sum is")
    if together:
        return ("Together that is", "Then add both:", f"{c.name} and {c.other} have", "Now add")
    return ("Then add", "Next,", f"Now {c.they} has", f"Add the other {c.things}:", "We go on with", "The next sum is")


_WRITERS = {"two": _gathering_problem, "three": _gathering_problem, "more": _comparison_problem}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sums.problems",
        description="Print problems as JSON lines with GSM8K's fields, or as `topw compare` reads them.",
    )
    parser.add_argument("--count", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--train", action="store_true", help="print training problems; default: held-out problems")
    parser.add_argument("--prompts", action="store_true", help="print prompts with accepted answers")
    options = parser.parse_args()
    for problem in islice(problems(options.seed, held_out=not options.train), options.count):
        fields: dict[str, object] = {"question": problem.question, "answer": problem.answer}
        if options.prompts:
            fields = {"prompt": problem.prompt, "answers": [f"#### {problem.total}"], "max_new_tokens": NEW_TOKENS}
        print(json.dumps(fields))


if __name__ == "__main__":
    main()
