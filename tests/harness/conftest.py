"""Models of lm-evaluation-harness from toy folders. Only tests import the harness, because that takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import Toy, export

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
Open = Callable[..., Any]
"""The fixture `opened`: (folder or None for `scoring`, **model_args) -> the model."""


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(11)


@pytest.fixture(scope="session")
def scoring(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output `logits` and a chat template."""
    folder = tmp_path_factory.mktemp("scoring") / "out"
    return export(folder, toy, form="grouped", with_logits=True, chat_template=TEMPLATE)


@pytest.fixture
def opened(scoring: Path) -> Iterator[Open]:
    from lm_eval.api.registry import get_model

    import topw_lab.harness  # noqa: F401  # registers the class

    found: list[Any] = []

    def new(folder: Path | None = None, **arguments: Any) -> Any:
        found.append(get_model("topw_deploy")(path=str(folder or scoring), provider="cpu", **arguments))
        return found[-1]

    yield new
    for model in found:
        model.close()


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]
