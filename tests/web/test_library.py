"""The JavaScript library's random numbers, names and defaults are those of the Python package."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.browser import run_node
from topw_deploy.runtime.inputs import uniforms
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.sampling import uniform_for
from topw_deploy.sampling.parameters import METRICS, PRESETS, preset_parameters
from topw_deploy.sampling.rules import RULES
from topw_deploy.sampling.seeds import sequence_seed

HERE = Path(__file__).parent
LARGEST = 2**64 - 1
PYTHON_ONLY = {"structured_outputs", "logprobs", "prompt_logprobs", "speculate"}


def triples() -> list[tuple[int, int, int]]:
    """(seed, low, high), with every carry of the counter."""
    edges = (0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, LARGEST)
    found = [(seed, low, high) for seed in edges for low in edges for high in edges]
    numbers = random.Random(3)
    return found + [tuple(numbers.getrandbits(numbers.randint(1, 64)) for _ in range(3)) for _ in range(3000)]  # type: ignore[misc]


def test_uniform_numbers_are_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "triples.json").write_text(json.dumps([[str(n) for n in triple] for triple in triples()]))
    found = run_node(HERE / "random.mjs", str(tmp_path / "triples.json"))
    assert found["uniforms"] == [uniform_for(seed, low) for seed, low, _ in triples()]
    assert [int(seed) for seed in found["seeds"]] == [sequence_seed(seed, low % 2**53) for seed, low, _ in triples()]
    row = uniforms(7, 100, 50)
    assert all(uniform_for(7, 100 + step) == row[step] for step in range(50)), "what the loop in Python draws with"


def test_words_are_those_of_the_contract(tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs" / "contract" / "random.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if "| 0x" in line]
    (tmp_path / "triples.json").write_text(json.dumps([[cell.strip() for cell in row[:3]] for row in rows]))
    assert len(rows) > 8
    found = run_node(HERE / "random.mjs", str(tmp_path / "triples.json"))
    assert [int(word) for word in found["words"]] == [int(row[3].strip(), 16) for row in rows]


def test_names_defaults_rules_and_presets_are_pythons() -> None:
    found = run_node(HERE / "names.mjs")

    def of(parameters: dict[str, object]) -> dict[str, object]:
        return {
            name: [list(p.default) if isinstance(p.default, tuple) else p.default, p.depth]  # type: ignore[attr-defined]
            for name, p in parameters.items()
        }

    assert found["rows"] == of({name: p for name, p in PARAMETERS.items() if p.per_prompt and name not in PYTHON_ONLY})
    whole = ("num_return_sequences", "skip_special_tokens", "add_special_tokens")
    assert found["requests"] == of({name: PARAMETERS[name] for name in whole})
    assert found["aliases"] == dict(ALIASES)
    rules = [[r.code, r.name, [[value.name, value.default] for value in r.values]] for r in RULES.values()]
    assert found["rules"] == rules
    assert found["presets"] == {
        name: [preset_parameters(name, metric, 256) for metric in (["cosine"] if name == "released" else METRICS)]
        for name in PRESETS
    }
    assert METRICS == ("mahalanobis", "unit", "cosine", "uniform")  # the order in names.mjs
