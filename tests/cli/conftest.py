from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.invoking import invoke  # noqa: F401  # a fixture
from tests.support.toy_model import EOS, Toy, byte_ids, export

ANSWER = "hello 😀 world."
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers ANSWER to one-token prompts."""
    toy = Toy.script([*byte_ids(ANSWER), EOS], prompt_tokens=1)
    return export(tmp_path_factory.mktemp("scripted") / "out", toy)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("random") / "out", Toy.random(7), with_mass=True, chat_template=TEMPLATE)
