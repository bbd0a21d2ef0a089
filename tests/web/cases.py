"""Requests for both runtimes, and what their results have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.browser import run_node
from topw_deploy.errors import TopWError
from topw_deploy.runtime import GenerationResult, TopWModel

EXACT = ("token_ids", "text", "kept", "certified", "rule", "finish_reason", "stop", "prompt_tokens")
PROMPTS = ("class Path", "def parse(text, *, strict=False):\n    ", "import os\nos.", "The")
LONG = "The module provides classes for reading and writing files. " * 12

Case = dict[str, Any]


def case(prompt: Any = "class Path", **parameters: Any) -> Case:
    return {"prompt": prompt, "parameters": {"seed": 5, "max_new_tokens": 16, **parameters}}


RULES: tuple[Case, ...] = tuple(
    case(temperature=1.2, **parameters)
    for parameters in (
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05, "selection_temperature": 2},
        {"rule": "top_h"},
        {"top_h": 0.6, "top_h_pool": 50},
        {"typical_p": 0.9},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.02},
        {"rule": "top_n_sigma"},
        {"rule": "p_less"},
        {"min_k_tau": 5},
        {"rule": "none"},
    )
)
PARAMETERS: tuple[Case, ...] = (
    *(case(seed=seed, max_new_tokens=40) for seed in (0, 7, 2**53 - 1, 2**64 - 1)),
    case(preset="paper", temperature=1.5),
    case(preset="creative", temperature=1.3),
    case("def parse(", preset="lively", seed=2, max_new_tokens=72),
    case(preset="lively", lam=0.7, seed=11),
    case(lam=0.5, beta="2+0.5*T", temperature=2, init_top_p=0.4),
    case(geom_scale=-0.5, lam=0.3, selection_temperature=2, beta=6),
    case(do_sample=False),
    case(temperature=0, min_new_tokens=8),
    case(preset="lively", repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_new_tokens=40),
    case(preset="lively", logit_bias={"28": 4, "274": -100}, suppress_tokens=[10], no_repeat_ngram_size=2),
    case(preset="lively", bad_words=["self", "class"], bad_words_ids=None, ignore_eos=True),
    case(preset="lively", allowed_token_ids=list(range(3, 900)), min_length=20),
    case(preset="lively", stop=["\n\n", "self"], max_tokens=60),
    case(preset="lively", stop_strings="(", min_new_tokens=10, max_new_tokens=40),
    case("é 😀", preset="lively", add_special_tokens=False),
    case([0, 50, 60, 70], preset="lively", max_length=30, max_new_tokens=None),
    case(LONG, preset="lively", max_new_tokens=30),
)
BATCHES: tuple[Case, ...] = (
    case(list(PROMPTS), seed=[1, 2, 3, 2**64 - 1], preset="lively", stop=[["\n"], ["xyz"], [], ["("]]),
    case(list(PROMPTS), top_p=[0.9, None, None, None], min_p=[None, 0.1, None, None], temperature=[1, 1.5, 0, 2]),
    case([LONG, "The"], preset="lively", max_new_tokens=[5, 40]),
    case("import", preset="lively", n=3),
)
CASES = (*RULES, *PARAMETERS, *BATCHES)

WRONG: tuple[Case, ...] = (
    case(temperature=-1),
    case(top_p=0),
    case(top_p=0.9, min_p=0.1),
    case(rule="min_p"),
    case(rule="min_p", min_p=0.1, top_k=3),
    case(no_such_name=1),
    case(top_m=5),
    case(max_tokens=3, max_new_tokens=4),
    case(max_length=90, max_new_tokens=4),
    case(seed=2**64),
    case(seed=-1),
    case(preset="released"),
    case(beta="T*T"),
    case(beta="1-2*T"),
    case(geom_unit="median"),
    case(geom_unit="median", geom_scale=1),
    case(eos_token_id=4096),
    case(logit_bias={"5": float("1e39")}),
    case(allowed_token_ids=[]),
    case(list(PROMPTS), temperature=[1, 2]),
    case([0, 4096]),
    case([list(range(5)), [-1]]),
    case("x" * 600, add_special_tokens=False, max_length=10, max_new_tokens=None),
)


def write_cases(cases: Iterable[Case], path: Path) -> Path:
    """The cases as JSON for tests/web/values.mjs."""

    def big(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: big(one) for name, one in value.items()}
        if isinstance(value, list):
            return [big(one) for one in value]
        return {"big": str(value)} if isinstance(value, int) and abs(value) >= 2**53 else value

    path.write_text(json.dumps([big(one) for one in cases]), encoding="utf-8")
    return path


def python_results(model: TopWModel, one: Case) -> list[GenerationResult] | str:
    """Python's results of a case, or the name of its error."""
    parameters = dict(one["parameters"])
    try:
        found = model.generate(one["prompt"], **parameters)
    except TopWError as error:
        return type(error).__name__
    return found if isinstance(found, list) else [found]


def differences(model: TopWModel, cases: Sequence[Case], answers: Sequence[Any]) -> list[str]:
    """What differs between Python's results and the other runtime's, a line per row."""
    found = []
    for one, answer in zip(cases, answers, strict=True):
        wanted = python_results(model, one)
        if isinstance(wanted, str) or isinstance(answer, dict):
            if not isinstance(answer, dict) or answer["error"] != wanted:
                found.append(f"{one}: {wanted} in Python, {str(answer)[:300]} in JavaScript")
            continue
        for row, (ours, theirs) in enumerate(zip(wanted, answer, strict=True)):
            found += [f"{one['parameters']} row {row}: {line}" for line in _row_differences(ours, theirs)]
    return found


def by_node(folder: Path, cases: Sequence[Case], tmp_path: Path) -> list[Any]:
    """The answers of the JavaScript library under Node."""
    file = write_cases(cases, tmp_path / "cases.json")
    answers: list[Any] = run_node(Path(__file__).with_name("requests.mjs"), str(folder), str(file))
    return answers


def drive(site: Path, tmp_path: Path, **options: Any) -> Any:
    """What a site does in the browser. options: those of page.mjs."""
    (tmp_path / "options.json").write_text(json.dumps(options), encoding="utf-8")
    return run_node(Path(__file__).with_name("page.mjs"), str(site), str(tmp_path / "options.json"))


def opened(folder: Path, sampler: str = "graph") -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1, sampler=sampler)


def shared_start(model: TopWModel, cases: Sequence[Case], answers: Sequence[Any]) -> tuple[float, float]:
    """For logits in float16: the share of tokens before each row's first other one, and the largest difference of a
    log-probability among them."""
    equal = drawn = 0
    farthest = 0.0
    for one, answer in zip(cases, answers, strict=True):
        wanted = python_results(model, one)
        assert not isinstance(wanted, str), wanted
        for ours, theirs in zip(wanted, answer, strict=True):
            pairs = enumerate(zip(ours.token_ids, theirs["token_ids"], strict=False))
            same = next((place for place, (a, b) in pairs if a != b), len(ours.token_ids))
            gaps = np.abs(np.subtract(ours.logprobs[:same], theirs["logprobs"][:same]))
            farthest = max(farthest, float(gaps.max(initial=0)))
            equal, drawn = equal + same, drawn + len(ours.token_ids)
    return equal / drawn, farthest


def _row_differences(ours: GenerationResult, theirs: Case) -> list[str]:
    lines = [
        f"{name} is {getattr(ours, name)} in Python, {theirs[name]} in JavaScript"
        for name in EXACT
        if getattr(ours, name) != theirs[name]
    ]
    if str(ours.seed) != theirs["seed"]:
        lines.append(f"seed is {ours.seed} in Python, {theirs['seed']} in JavaScript")
    if not lines and not np.allclose(ours.logprobs, theirs["logprobs"], rtol=0, atol=1e-4):
        lines.append("log-probabilities differ by more than 1e-4")
    return lines
