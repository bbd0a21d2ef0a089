"""The simulation of many replicas, and the formulas of their size."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sizing
from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.compare import compare
from benchmarks.fleet.costs import Costs, stored_costs
from benchmarks.fleet.replica import Replica, Sequence
from benchmarks.fleet.simulate import ROUTINGS, simulate
from benchmarks.fleet.workload import Requests, Workload, draw_requests
from tests.support.toy_model import Toy, export

SCALE = Path(__file__).parents[2] / "docs" / "guide" / "scale.md"
COSTS = Costs(step=(1.0, 1.5), chunk_fixed=0.5, chunk_token=0.01, chunk=100, model="", machine="")
SMALL = Costs(step=(0.01, 0.011, 0.012, 0.013), chunk_fixed=0.005, chunk_token=1e-4, chunk=256, model="", machine="")


def requests(*rows: tuple[float, int, int, int, int]) -> Requests:
    arrival, group, shared, prompt, new = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrival, group, shared, prompt, new)


def ends(replica: Replica) -> list[Sequence]:
    found = []
    while replica.until < float("inf"):
        found += replica.finish()
    return found


def test_routing_by_load_beats_chance_and_routing_by_prefix_reuses_more() -> None:
    drawn = draw_requests(replace(Workload(), groups=200), 3000, seed=0)
    rate = 20 * 0.85 / SMALL.request(float(drawn.prompt.mean()), float(drawn.new.mean()))
    found = {routing: simulate(SMALL, drawn.at_rate(rate), 20, routing) for routing in ROUTINGS}
    p99 = {routing: np.percentile(each.first, 99) for routing, each in found.items()}
    assert p99["random"] > p99["two choices"] >= p99["least loaded"]
    assert found["prefix"].reused > 1.5 * found["random"].reused


def test_the_simulation_is_the_engine_on_a_virtual_clock(tmp_path: Path) -> None:
    """The bound is for tokens that prompts share by chance, as the vocabulary has only 259; the seeds are fixed."""
    folder = export(tmp_path / "toy", Toy.random(3), form="grouped")
    drawn = draw_requests(Workload(prompt=12, new=10, shared=20, groups=6, most=90), 60, seed=0)
    found = compare(folder, replace(SMALL, chunk=16), drawn, load=0.9)
    assert found.measured["prompt tokens reused"] > 0.1
    for name, measured in found.measured.items():
        assert found.simulated[name] == pytest.approx(measured, rel=0.12), name


def test_the_memory_is_that_of_the_engine(tmp_path: Path) -> None:
    from topw_deploy.engine import Engine
    from topw_deploy.runtime import TopWModel

    folder = export(tmp_path / "toy", Toy.random(3), form="grouped")
    found = sizing.estimate_memory(folder, 3, 64)
    with (
        TopWModel.from_pretrained(folder, provider="cpu") as model,
        Engine(model, max_batch=3, max_length=64) as engine,
    ):
        assert engine.stats().cache_bytes == pytest.approx(3 * found.row, rel=0.01)
    parts = (found.weights, found.tied, 3 * found.row, found.work)
    assert found.total == sizing.PROCESS + 16 * (folder / "tokenizer.json").stat().st_size + sum(parts)
    assert found.total - sizing.estimate_memory(folder, 2, 64).total == found.row + 4 * Toy.random(3).vocab


@pytest.mark.slow
def test_the_memory_of_the_bundled_model_is_measured_below_the_formula(demo_export: Path) -> None:
    """docs/guide/scale.md has 128 of 174 MiB for eight rows of 512 tokens."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.sizing",
        str(demo_export),
        "--rows",
        "2",
        "--length",
        "128",
        "--measure",
    ]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "tied table 4.0 MiB" in found  # 4,096 tokens of 256 float32
    share = re.search(r"measured [\d.]+ MiB, ([\d.]+) of this", found)
    assert share is not None
    assert 0.5 < float(share[1]) <= 1


def test_the_stored_costs_give_the_stored_figures() -> None:
    """The figures from which they were solved: a request's share of the rate, and the time to the first text."""
    costs = stored_costs(4)
    assert costs.chunk == 256
    assert costs.reading(8) == pytest.approx(16.8e-3)
    assert sum(costs.reading(tokens) for tokens in (256, 256, 256, 240)) == pytest.approx(70 * 16.8e-3)
    # 976 new tokens of 16 requests, whose prompts have 5,383 tokens and take two chunks each.
    reading = 32 * costs.chunk_fixed + 5383 * costs.chunk_token
    for width, rate in ((1, 111), (4, 123)):
        assert 976 / (reading + (976 - 16) * costs.step[width - 1] / width) == pytest.approx(rate)
    assert stored_costs(8).step[:4] == costs.step
    assert np.diff(stored_costs(8).step) == pytest.approx(costs.step[1] - costs.step[0])


def test_the_command_simulates_with_the_stored_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--replicas", "4", "--loads", "0.5", "--routings", "random", "prefix"])
    fleet.main()
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [["0.5", "random"], ["0.5", "prefix"]]


def test_the_number_of_replicas() -> None:
    assert sizing.needed_replicas(100, 0.05, 0.7) == 8
    assert COSTS.request(150, 4) == pytest.approx(2 * 0.5 + 1.5 + 3 * 1.5 / 2)
