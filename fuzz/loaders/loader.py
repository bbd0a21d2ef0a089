"""The class of a loader under test, and what several loaders share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.toy_model import Toy, export
from topw_deploy.errors import TopWError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if not loop.last %}{{ '\\n' * 2 }}{% endif %}{% endfor %}"
    "{% set ns = namespace(x='a') %}{% for i in range(3) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x }}"
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(2) }}{{ {'a': [1, 2.5]} | tojson(indent=2) }}"
    "{% if add_generation_prompt %}{{ '%s:%d' % ('a', 1) }}{{ '{0}{a}'.format(1, a=2) }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "x" * 100}]


@dataclass(frozen=True)
class Loader:
    """A loader under test.

    read: reads an input; raises TopWError if it refuses the input.
    seeds: inputs from which others are made; most are valid.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


Maker = Callable[[Path], Loader]
"""Makes a loader; takes a folder for its files."""


def refusal(loader: Loader, data: bytes) -> TopWError | None:
    """Read an input. Returns the error of a refusal, or None. Raises all other errors, because they are findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader.read(data)
        except TopWError as error:
            return error
    return None


def exported(scratch: Path) -> Path:
    """Make a small export below `scratch`. Returns its folder."""
    return export(scratch / "export", Toy.random(2), generation_config={"eos_token_id": 1}, chat_template=TEMPLATE)
