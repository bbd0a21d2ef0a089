"""`topw bench rules`: all rules draw equally many tokens, take turns in every round, and are compared by round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.support.toy_model import CONTEXT, Toy, byte_ids, export
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.rule_settings import read_rules
from topw_lab.bench.rules import overhead, run, start

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("rules") / "out", Toy.random(3))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rules": "top_w"}, ParameterError, "rules is top_w, but must have top_w once and at least one other"),
        ({"rules": "top_k=3,p_less"}, ParameterError, "rules is top_k 3, p_less, but must have top_w once"),
        ({"new_tokens": CONTEXT}, ParameterError, f"exceed the context of {CONTEXT}"),
        ({"samplers": ("numpy",)}, ParameterError, "'numpy' is not a side of this benchmark; choose from native, "),
        ({"samplers": ("native",)}, BenchmarkError, "native was requested, but is not here"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_NATIVE", "0")
    options = {"rules": "top_k=3,top_w", "temperatures": (0.5, 2.0), "prompt_tokens": 4, "new_tokens": 5, **changes}
    with pytest.raises(error, match=message):
        run([folder], **{**options, "rules": read_rules(options["rules"])})


# The worker


@pytest.mark.parametrize("text", ["top_k=3", "top_w"])
def test_a_generation_has_all_of_its_tokens_under_its_rule(folder: Path, text: str) -> None:
    settings = {"folder": str(folder), "sampler": "graph", "threads": 1, "prompt": PROMPT, "new_tokens": 6}
    (rule,) = read_rules(text)
    parameters = {**rule.parameters, "temperature": 2.0}
    found = start(settings)["run"](parameters=parameters, seed=3)
    model = TopWModel.from_pretrained(folder, provider="cpu", sampler="graph")
    result = model.generate(PROMPT, max_new_tokens=6, seed=3, ignore_eos=True, **parameters)
    assert len(result.token_ids) == 6
    assert found["kept"] == sum(result.kept) / 6
    assert found["certified"] == result.certified_share
    assert found["seconds"] > 0
    if text == "top_k=3":
        assert found["kept"] == 3


def test_a_generation_that_ends_early_is_an_error(tmp_path: Path) -> None:
    script = Toy.script(byte_ids("abcdef"), 4)
    stopping = export(tmp_path / "out", script, generation_config={"stop_strings": ["c"]})
    settings = {"folder": str(stopping), "sampler": "graph", "threads": 1, "prompt": PROMPT, "new_tokens": 6}
    with pytest.raises(BenchmarkError, match=r"ended after 3 of 6 tokens \(stop\); give a shorter prompt or"):
        start(settings)["run"](parameters={"rule": "top_w", "temperature": 1.0}, seed=0)


# The command


@pytest.mark.slow
def test_the_command_writes_table_json_and_picture(bench: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    done = bench("rules", folder, "--rules", "top_k=3,min_p=0.1,top_w", "--temperatures", "0.5,2", "--max-new-tokens",
                 "4", "--rounds", 2, "--prompt", "ab", "--samplers", "graph", "--quiet", "--json",
                 tmp_path / "out.json", "--plot", tmp_path / "out.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert f"{folder.name}, graph, 1 thread: ms/token" in done.stdout
    assert "Overhead of Top-W to the mean" in done.stdout
    assert "| min-p 0.1 " in done.stdout
    assert "| model" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    (model,) = document["runs"]
    places = [(cell["temperature"], cell["rule"]) for cell in model["cells"]]
    assert places == [(t, rule) for t in (0.5, 2.0) for rule in ("top_k 3", "min_p 0.1", "top_w")]
    assert all(min(cell["seconds"]) > 0 and len(cell["seconds"]) == 2 for cell in model["cells"])
    assert list(model["overhead"])[:3] == ["0.5", "2", "all"]
    assert document["settings"]["rules"] == ["top_k 3", "min_p 0.1", "top_w"]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_overhead_is_that_of_the_medians_and_its_interval_resamples_whole_rounds() -> None:
    # The second round is slow for all: in 7 of 27 drawings it is the median, 42 to (20 + 60) / 2.
    top_k, p_less, top_w = ([0.010, 0.020, 0.010], [0.030, 0.060, 0.030], [0.022, 0.042, 0.022])
    assert overhead(np.array([top_w]), np.array([top_k, p_less])) == pytest.approx((0.1, 0.05, 0.1))
    assert overhead(np.array([[0.012, 0.024, 0.012]]), np.array([top_k])) == pytest.approx((0.2, 0.2, 0.2))
