"""Random JSON schemas: random answers that their grammars allow must be valid.

    python -m fuzz.schemas [--schemas 10000] [--seed 0]

Tokens are single bytes, drawn at random from the mask. An answer is parsed and checked by `jsonschema`, which shares no
code with llguidance; two names of an object that are spelled differently but equal count as one. Schemas of the
unsupported subset are refused and counted. Exits with 1 if an answer is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
from tqdm import tqdm

from topw_deploy.errors import GrammarError
from topw_deploy.runtime.guide import Guide, MaskLayout, compile_grammar, read_tokens
from topw_deploy.runtime.structured import read_constraint

END = 256  # the token that ends an answer
_MOST_TOKENS = 160
_ANSWERS = 4  # of each schema

_NAMES = ("a", "b", "é", "x y", 'q"t', "\n\t", "", "😀", "key", "\\u0061", "a\\b", "/", "const", "enum")
_PATTERNS = ("^a+$", "b", "^[a-c]{2,3}$", r"\d", "^[a-z]+$", "^$", "a|b", "y$", ".", "^.{1,2}$", "[^a]", "^(ab)*$")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
_INTEGERS = (
    0,
    1,
    -1,
    5,
    10,
    99,
    -17,
    1000,
    2**31,
    2**53 - 1,
    2**53,
    -(2**53) - 1,
    10**18,
    2**64 + 1,
    1.0,
    3.0,
    1e3,
    1e16,
)
_NUMBERS = (0, 1, 0.5, 1.5, -2.25, -0.25, 0.1, 3.14159, 1e-5, 1e5, 1e-10, 123456.789, 1e22, 2**53 + 1, -0.0, 12, 12.5)
_VALUES: tuple[Any, ...] = (
    *(None, True, 1, -5, 2**53 + 1, 10**25, 1.5, 1e22, 1e-7, "a", "é", 'q"t', "\x00", "\n", "", [], [1, "a"], {"a": 1}),
    {"b": [2**60 + 1]},
)


class Schemas:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._makers: dict[str, Callable[[str, int], dict[str, Any]]] = {
            "string": self._text, "integer": self._number, "number": self._number, "const": self._value,
            "enum": self._value, "array": self._array, "object": self._object, "anyOf": self._parts,
            "allOf": self._parts, "oneOf": self._parts, "type": self._types,
        }  # fmt: skip

    def draw(self) -> dict[str, Any]:
        return {**self._schema(0), "$defs": {"d": {"type": "string", "maxLength": 2}}}

    def _schema(self, depth: int) -> dict[str, Any]:
        names = [name for name in self._makers if depth < 2 or name in ("string", "integer", "number", "const", "enum")]
        kind = self._random.choice([*names, "ref", "boolean"])
        if kind == "ref":
            return {"$ref": "#/$defs/d"}
        schema: dict[str, Any] = self._makers[kind](kind, depth) if kind in self._makers else {"type": kind}
        if self._chance(0.02):
            schema["not"] = {"type": "string"}
        return schema

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _text(self, _kind: str, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        keyword, values = self._random.choice([("pattern", _PATTERNS), ("format", _FORMATS), ("title", ("",))])
        schema[keyword] = self._random.choice(values)
        return schema | self._range("Length", 6)

    def _range(self, noun: str, most: int) -> dict[str, int]:
        least = self._random.randint(0, 3)
        both = {f"min{noun}": least, f"max{noun}": self._random.randint(least, most)}
        return {name: value for name, value in both.items() if self._chance(0.3)}

    def _number(self, kind: str, _depth: int) -> dict[str, Any]:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        values = _INTEGERS if kind == "integer" and self._chance(0.7) else _NUMBERS
        schema: dict[str, Any] = {"type": kind}
        schema |= {name: self._random.choice(values) for name in names if self._chance(0.3)}
        if self._chance(0.2):
            schema["multipleOf"] = self._random.choice((1, 2, 3, 7, 0.1, 0.25, 0.01, 10, 1.5))
        return schema

    def _value(self, kind: str, _depth: int) -> dict[str, Any]:
        values = self._random.choices(_VALUES, k=self._random.randint(1, 3))
        return {kind: values if kind == "enum" else values[0]}

    def _array(self, kind: str, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": kind, **self._range("Items", 4)}
        if self._chance(0.7):
            schema["items"] = self._schema(depth + 1)
        if self._chance(0.3):
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self._random.randint(1, 2))]
        return schema

    def _object(self, kind: str, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randint(0, 3))
        schema: dict[str, Any] = {"type": kind, "properties": {name: self._schema(depth + 1) for name in names}}
        schema["required"] = [name for name in names if self._chance(0.5)]
        if self._chance(0.6):
            schema["additionalProperties"] = self._random.choice([False, self._schema(depth + 1)])
        if self._chance(0.15):
            schema["patternProperties"] = {self._random.choice(_PATTERNS): self._schema(depth + 1)}
        return schema | (self._range("Properties", 4) if self._chance(0.3) else {})

    def _parts(self, kind: str, depth: int) -> dict[str, Any]:
        return {kind: [self._schema(depth + 1) for _ in range(self._random.randint(1, 2))]}

    def _types(self, kind: str, _depth: int) -> dict[str, Any]:
        types = self._random.sample(("string", "integer", "null", "number", "boolean"), 2)
        return {kind: types, "minimum": self._random.choice(_INTEGERS), "maxLength": 2}


class _Written(float):
    """A number that keeps its text, which may have more digits than a float."""

    def __init__(self, text: str) -> None:
        self.text = text


def _multiple_of(_validator: Any, step: Any, value: Any, _schema: Any) -> Any:
    """jsonschema's own check is wrong for 0.3 and 0.1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and Fraction(getattr(value, "text", str(value))) % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple_of})
_DATES = jsonschema.FormatChecker(formats=("date", "ipv4", "ipv6", "uuid", "email"))


def error_of(schema: dict[str, Any], text: str) -> str | None:
    """Why an answer is invalid; None if it is valid."""
    try:
        value = json.loads(text, parse_float=_Written)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(iter(_VALIDATOR(schema, format_checker=_DATES).iter_errors(value)), None)
    return None if found is None else f"{found.validator}: {found.message}"


class Answers:
    """Draws answers over single bytes."""

    def __init__(self, seed: int) -> None:
        texts = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        self._tokens, self._layout = read_tokens(texts, [END]), MaskLayout([*texts[:END], b""])
        self._random = np.random.default_rng(seed)
        self._weights = np.full(END + 1, 0.02)
        self._weights[32:127] = 0.3
        self._weights[list(b'"}],:{[')], self._weights[list(b"0123456789.-abcu\\")] = 3, 1.5
        self._weights[END] = 8

    def draw(self, schema: dict[str, Any], count: int) -> list[str]:
        """Complete answers, at most `count`. Raises GrammarError for a schema that is refused."""
        matcher = compile_grammar(read_constraint("structured_outputs", {"json": schema}), self._tokens)
        found = (self._answer(Guide(matcher.deep_copy(), self._layout, [END])) for _ in range(count))
        return [text for text in found if text is not None]

    def _answer(self, guide: Guide) -> str | None:
        guide.start()
        answer = bytearray()
        while len(answer) < _MOST_TOKENS:
            allowed = np.unpackbits(guide.mask.view(np.uint8), bitorder="little")[: END + 1]
            weights = self._weights * allowed
            token = int(self._random.choice(END + 1, p=weights / weights.sum()))
            if token == END:
                return answer.decode("utf-8", "surrogateescape")
            answer.append(token)
            if guide.take(token):
                return answer.decode("utf-8", "surrogateescape")
        return None


@dataclass
class Outcome:
    """answers: number of complete answers. refused: messages -> number of schemas. invalid: descriptions."""

    answers: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)


def run(count: int, seed: int = 0, *, quiet: bool = True) -> Outcome:
    """Draw and check `count` schemas."""
    schemas, answers, outcome = Schemas(seed), Answers(seed), Outcome()
    for _ in tqdm(range(count), disable=quiet):
        schema = schemas.draw()
        try:
            texts = answers.draw(schema, _ANSWERS)
        except GrammarError as error:
            outcome.refused[str(error)[:50]] += 1
            continue
        outcome.answers += len(texts)
        for text in texts:
            if (why := error_of(schema, text)) is not None:
                outcome.invalid.append(f"{text!r} of {json.dumps(schema)}: {why}")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    asked = parser.parse_args()
    outcome = run(asked.schemas, asked.seed, quiet=False)
    for message, number in outcome.refused.most_common(12):
        print(f"{number:6} refused: {message}")
    print("\n".join(outcome.invalid[:20]))
    print(f"{outcome.answers} answers, {len(outcome.invalid)} invalid; {outcome.refused.total()} schemas refused")
    sys.exit(bool(outcome.invalid))


if __name__ == "__main__":
    main()
