from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import invoke  # noqa: F401  # a fixture
from tests.support.toy_model import Toy, export
from topw_deploy.runtime.rule_settings import RuleSetting, read_rules
from topw_lab.compare.comparison import Comparison, Prompt, RuleTexts, Sample, compare, summarise


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(5)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    """An export with logits and mass, over which the engine runs."""
    return export(tmp_path_factory.mktemp("toy") / "out", toy, form="grouped", with_logits=True, with_mass=True)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    """An export without logits and mass. Its cache has a form that the engine refuses."""
    return export(tmp_path_factory.mktemp("bare") / "out", toy)


def text_prompts(*contents: str, **parameters: Any) -> list[Prompt]:
    return [(content, f"line {number}", parameters) for number, content in enumerate(contents, 1)]


def compare_texts(folder: Path, prompts: list[Prompt], rules: str = "top_w,none", **changes: Any) -> Comparison:
    given: dict[str, Any] = {"temperatures": [1.0], "samples": 2, "max_new_tokens": 6, **changes}
    return compare(folder, prompts, read_rules(rules), **given)


def sample(text: str = "ab", tokens: tuple[int, ...] = (1, 2), **changes: Any) -> Sample:
    drawn = len(tokens)
    given: dict[str, Any] = {
        "drawn": drawn, "kept": 2 * drawn, "certified": drawn, "mass": 0.5 * drawn, "surprisal": 1.0 * drawn,
        "finish_reason": "length",
    }  # fmt: skip
    return Sample(text=text, token_ids=list(tokens), **{**given, **changes})


def comparison(
    samples: Callable[[RuleSetting, float, int], list[Sample]],
    prompts: tuple[str, ...] = ("one", "two"),
    rules: str = "top_w,none",
    temperatures: tuple[float, ...] = (0.5, 2.0),
    folder: str = "out",
    missing: tuple[str, ...] = (),
    answers: tuple[list[str], ...] = (),
) -> Comparison:
    """A comparison with the texts of `samples(rule, temperature, place of the prompt)`."""
    settings = read_rules(rules)
    cells = [
        RuleTexts(rule, temperature, [samples(rule, temperature, place) for place in range(len(prompts))], 0.5)
        for temperature in temperatures
        for rule in settings
    ]
    for cell in cells:
        summarise(cell)
    return Comparison(
        folder=Path(folder), model="d1ge57", provider="CPUExecutionProvider", sampler="native", seed=0,
        samples=len(cells[0].samples[0]), max_new_tokens=64, ignore_eos=False, missing_outputs=list(missing),
        rules=settings, temperatures=list(temperatures), prompts=list(prompts),
        answers=list(answers), cells=cells,
    )  # fmt: skip
