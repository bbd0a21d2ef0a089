"""`topw bench serve`: every request is served, and the times of its texts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_lab.bench import serve as serve_module
from topw_lab.bench.serve import (
    Latencies,
    Load,
    ServeRequest,
    ServeWorker,
    fit_lengths,
    log_normal_lengths,
    make_requests,
    own_sides,
    run,
    run_requests,
)
from topw_lab.bench.sides import Side

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


@pytest.fixture
def asked(folder: Path) -> ServeRequest:
    return ServeRequest(folder=folder, concurrency=(1, 3), requests=2, rows=2, prefill_budget=8, rounds=2)


# Lengths


def test_lengths_have_the_mean_and_the_tail_of_a_log_normal_distribution() -> None:
    lengths = np.array(log_normal_lengths(1000, 342))
    assert lengths.mean() == pytest.approx(342, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.6, rel=0.01)
    assert log_normal_lengths(3, 1) == [1, 1, 1]


def test_requests_depend_only_on_their_number_and_the_seed(folder: Path) -> None:
    lengths = fit_lengths(ServeRequest(folder=folder, concurrency=(1,)))
    found = make_requests(lengths, 16, 0)
    assert found == make_requests(lengths, 16, 0) != make_requests(lengths, 16, 1)
    assert len({len(prompt) for prompt, _ in found}) > 8
    assert max(len(prompt) + new_tokens for prompt, new_tokens in found) <= lengths.longest
    assert all(0 <= token < VOCAB for prompt, _ in found for token in prompt)


def test_by_default_lengths_fit_a_short_context(folder: Path) -> None:
    lengths = fit_lengths(ServeRequest(folder=folder))
    assert (lengths.prompt_tokens, lengths.new_tokens) == (12, 12)
    assert (lengths.long_tokens, lengths.prefix_tokens) == (95, 87)
    assert lengths.longest <= lengths.context == 96


# What the worker measures


@pytest.mark.parametrize("side", ["engine", "one_by_one", "static"])
@pytest.mark.parametrize("callers", [1, 3])
def test_every_request_has_a_first_text_and_no_time_exceeds_the_whole(
    server: ServeWorker, side: str, callers: int
) -> None:
    served = getattr(server, side)(REQUESTS, callers)
    assert len(served["first"]) == len(REQUESTS)
    assert len(served["between"]) <= NEW - len(REQUESTS)
    assert 0 < max(served["first"]) <= served["seconds"]
    assert sum(served["between"]) <= callers * served["seconds"]


def test_the_engine_reports_the_share_of_its_time_outside_runs(server: ServeWorker) -> None:
    served = server.engine([([1, 2], 30)] * 2, 2)
    assert 0 < served["steady"] < 1
    assert 0 < served["outside"] < 1
    assert server.engine([([1], 1)], 1)["steady"] == 0, "it has no step"


def test_callers_of_generate_wait_for_those_before_them(
    server: ServeWorker, model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(serve_module.time, "perf_counter", lambda: float(next(clock)))
    generate = model.generate(REQUESTS[0][0], max_new_tokens=2, seed=1)
    now = replace(generate, timings=replace(generate.timings, prefill_seconds=0.25))
    monkeypatch.setattr(model, "generate", lambda *_arguments, **_parameters: now)
    first = server.one_by_one([([1], 2)] * 4, callers=2)["first"]
    # Begun at 0. Requests start at 1, 3, 5 and 7, and end one later: the third is sent at 2, the fourth at 4.
    assert first == [1.25, 3.25, 3.25, 3.25]


@pytest.mark.parametrize(("callers", "steps"), [(1, 3 + 0 + 5 + 2 + 1), (5, 6)])
def test_the_runs_alone_serve_the_requests_by_the_engines_schedule(model: TopWModel, callers: int, steps: int) -> None:
    session, _ = model._require_open()
    batch = Batch(session, model.manifest.decoder, callers, 96)
    reads: list[int] = []
    read = batch.read

    def counted(row: int, request: Any, start: int, end: int) -> int | None:
        reads.append(end - start)
        return read(row, request, start, end)

    batch.read = counted  # type: ignore[method-assign]
    requests = [model.prepare(prompt, max_new_tokens=new, seed=1, ignore_eos=True)[0] for prompt, new in REQUESTS]
    for _ in range(2):  # all rows are free again
        before = batch.steps
        reads.clear()
        took = run_requests(batch, callers, 8, requests, callers)
        assert 0 < took <= batch.run_seconds
        assert sum(reads) == sum(len(prompt) for prompt, _ in REQUESTS)
        assert max(reads) == 8
        assert batch.steps - before >= steps if callers > 1 else batch.steps - before == steps
        assert batch.steps - before <= sum(new - 1 for _, new in REQUESTS)


def test_a_short_request_that_waits_for_a_long_prompt_is_timed(server: ServeWorker) -> None:
    assert server.wait_behind_prompt([5] * 90, [1, 2, 3], budget=8) > 0


def test_the_second_prompt_of_a_prefix_reuses_it(server: ServeWorker) -> None:
    before = server._engine(2, reuse=True).stats().cached_tokens
    read, reused = server.wait_after_prefix([11] * 60, [[1, 2], [3, 4]])
    assert min(read, reused) > 0
    assert server._engine(2, reuse=True).stats().cached_tokens - before == 60


# The run


@pytest.mark.slow
def test_a_report_has_every_side_and_latency(asked: ServeRequest) -> None:
    document = json.loads(json.dumps(run(asked).as_dict()))
    (found,) = document["runs"]
    assert [load["callers"] for load in found["loads"]] == [1, 3]
    assert list(found["loads"][0]["sides"]) == ["engine", "one-by-one", "ideal"]
    assert list(found["loads"][1]["sides"]) == ["engine", "one-by-one", "static", "ideal"]
    assert all(len(side["seconds"]) == 2 for load in found["loads"] for side in load["sides"].values())
    assert len(found["latencies"]) == 2
    for values in found["latencies"]:
        assert values["lost"] < 1, "below 0 if something else delays the runs alone"
        assert min(value for name, value in values.items() if name != "lost") > 0
    side = found["loads"][1]["sides"]["engine"]
    assert side["ratio"]["median"] == 1.0
    assert len(side["outside"]) == len(side["steady"]) == 2


@pytest.mark.slow
def test_a_side_of_another_library_is_served_the_same_requests(asked: ServeRequest, tmp_path: Path) -> None:
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
    report = run(replace(asked, concurrency=(3,), rounds=1, peers=("engine", "other")), others=[other])
    (load,) = report.results["runs"][0]["loads"]
    assert list(load["sides"]) == ["engine", "other"]
    assert load["sides"]["other"]["seconds"] == [float(load["new_tokens"])]
    assert load["sides"]["other"]["ratio"]["median"] > 1


def test_a_load_and_latencies_are_summarised(asked: ServeRequest) -> None:
    served = {
        name: [{"seconds": took, "first": [took / 2], "between": [], "outside": 0.02} for took in seconds]
        for name, seconds in {"engine": (2.0, 4.0), "static": (3.0, 6.0)}.items()
    }
    sides = [side for side in own_sides(asked) if side.name in served]
    load = Load(callers=4, requests=[([1] * 200, 50)] * 6, sides=sides, served=served)
    assert load.title == "4 callers: 6 requests, 1,200 prompt and 300 new tokens"
    assert load.row(sides[1])[1:5] == ("1.33", "66.7", "1.500 (1.500-1.500)", "2,250 / 2,980")
    panel = load.panel("")
    assert panel.title == "4 callers get 100 new tokens/s: 1.5x faster than generate of lists"
    assert [bar.kind for bar in panel.bars] == ["ours", "yardstick"]
    values = {"chunked": 0.1, "whole": 0.5, "read": 0.4, "reused": 0.01, "steady": 0.01, "outside": 0.02, "lost": 0.06,
              "step": 0.001}  # fmt: skip
    latencies, lengths = Latencies([values]), fit_lengths(asked)
    text = "\n".join(latencies.lines(8, lengths))
    assert "1.0 (1.0-1.0) % of the engine's time is outside the session's runs between starts and ends" in text
    assert "2.0 (2.0-2.0) % in all; the runs alone take 6.0 (6.0-6.0) % less time." in text
    assert "5.0 (5.0-5.0) times as long" in text
    assert "40.0 (40.0-40.0) times as fast" in text
    title = latencies.panel("", lengths).title
    assert "5.0x sooner behind a prompt read in chunks, and 40x sooner after a reused prefix" in title


# Refusals


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt_tokens": 60}, ParameterError, "prompt_tokens is 60, so a sequence may need .* the context has 96"),
        ({"long_tokens": 96}, ParameterError, "long_tokens is 96, so a sequence may need 97 tokens"),
        ({"prefix_tokens": 90}, ParameterError, "prefix_tokens is 90, so a sequence may need 99 tokens"),
        ({"peers": ("vllm",)}, ParameterError, "'vllm' is not a side of this benchmark; choose from engine, one-by"),
        ({"peers": ("x",)}, BenchmarkError, "x was requested, but is not installed"),
        ({"folder": Path("nowhere")}, ManifestError, "nowhere"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    asked: ServeRequest, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    absent = Side(name="x", label="an x", kind="peer", settings={}, why_not="not installed: pip install x")
    with pytest.raises(error, match=message):
        run(replace(asked, **changes), others=[absent])


# The command


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json_and_a_picture(
    bench: Callable[..., Result], folder: Path, tmp_path: Path
) -> None:
    done = bench("serve", folder, "--concurrency", 2, "--requests", 2, "--rounds", 1, "--json", tmp_path / "out.json",
                 "--plot", tmp_path / "out.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| generate one by one" in done.stdout
    assert "First text of a request of 16 tokens while a prompt of 95 is read" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["concurrency"] == [2]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("value", ["1,many", "4,0"])
def test_the_command_refuses_callers_that_are_not_numbers(
    bench: Callable[..., Result], folder: Path, value: str
) -> None:
    assert bench("serve", folder, "--concurrency", value).exit_code == 2
