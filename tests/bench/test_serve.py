"""`topw bench serve`: every request is served, and the times of its texts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_lab.bench.base import Side
from topw_lab.bench.serve import ServeWorker, log_normal_lengths, make_requests, run

REQUESTS = [([5, 9, 40], 4), ([7] * 11, 1), ([8, 3], 6), ([50, 51, 52, 53], 3), ([9], 2)]
NEW = sum(new_tokens for _, new_tokens in REQUESTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("serve") / "out", Toy.random(3), form="grouped")


@pytest.fixture(scope="module")
def model(folder: Path) -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.fixture(scope="module")
def server(model: TopWModel) -> ServeWorker:
    return ServeWorker(model, rows=2, prefill_budget=4)


def test_lengths_have_the_mean_and_the_tail_of_a_log_normal_distribution() -> None:
    lengths = np.array(log_normal_lengths(1000, 342))
    assert lengths.mean() == pytest.approx(342, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.6, rel=0.01)
    assert log_normal_lengths(3, 1) == [1, 1, 1]


def test_requests_fit_the_context_and_depend_only_on_their_number_and_the_seed(folder: Path) -> None:
    requests = make_requests(folder, 16)
    assert requests == make_requests(folder, 16) != make_requests(folder, 16, seed=1)
    assert len({len(prompt) for prompt, _ in requests}) > 8
    assert max(len(prompt) + new_tokens for prompt, new_tokens in requests) <= 96
    assert all(0 <= token < VOCAB for prompt, _ in requests for token in prompt)


# What the worker measures


@pytest.mark.parametrize(("side", "options"), [("engine", {}), ("generate", {"size": 1}), ("generate", {})])
@pytest.mark.parametrize("callers", [1, 3])
def test_every_request_has_a_first_text_and_no_time_exceeds_the_whole(
    server: ServeWorker, side: str, options: dict[str, int], callers: int
) -> None:
    served = getattr(server, side)(REQUESTS, callers, **options)
    assert len(served["first"]) == len(REQUESTS)
    assert len(served["between"]) <= NEW - len(REQUESTS)
    assert 0 < max(served["first"]) <= served["seconds"]
    assert sum(served["between"]) <= callers * served["seconds"]


# The command


@pytest.mark.slow
def test_the_command_reports_every_side(bench: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    done = bench("serve", folder, "--concurrency", "1,3", "--requests", 2, "--rows", 2, "--rounds", 2, "--json",
                 tmp_path / "out.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| generate one by one" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    one, three = document["runs"]
    assert document["settings"]["concurrency"] == [1, 3]
    assert list(one["sides"]) == ["engine", "one-by-one"]
    assert list(three["sides"]) == ["engine", "one-by-one", "static"]
    assert all(len(side["seconds"]) == 2 for side in three["sides"].values())
    assert three["sides"]["engine"]["ratio"]["median"] == 1.0


@pytest.mark.slow
def test_a_side_of_another_library_is_served_the_same_requests(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "side.py"
    file.write_text(
        "def start(settings):\n"
        "    def serve(requests, callers):\n"
        "        seconds = float(sum(new for _, new in requests))\n"
        "        return {'seconds': seconds, 'first': [1.0] * len(requests), 'between': []}\n"
        "    return {'serve': serve}\n",
        encoding="utf-8",
    )
    other = Side(name="other", label="another", kind="peer", worker=file, do="serve", settings={})
    report = run(folder, concurrency=(3,), requests=2, rows=2, rounds=1, peers=("other",), others=[other])
    (load,) = report.runs
    assert list(load["sides"]) == ["other"]
    assert load["sides"]["other"]["seconds"] == [float(load["new_tokens"])]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt_tokens": 60}, ParameterError, "but the context has 96; lower prompt_tokens or new_tokens"),
        ({"peers": ("vllm",)}, ParameterError, "'vllm' is not a side of this benchmark; choose from engine, one-by"),
        ({"peers": ("x",)}, BenchmarkError, "an x was requested, but is not installed"),
        ({"folder": Path("nowhere")}, ManifestError, "nowhere"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    absent = Side(name="x", label="an x", kind="peer", settings={}, why_not="not installed: pip install x")
    with pytest.raises(error, match=message):
        run(**{"folder": folder, "others": [absent], **changes})
