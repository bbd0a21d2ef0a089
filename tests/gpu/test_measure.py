"""Sides measure what they claim; differences are per round."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.gpu import certified, open_rows, speed
from benchmarks.gpu.certified import NotCertifiedError, certified_step, logits_on
from benchmarks.gpu.decoder import decoder
from benchmarks.gpu.device import DeviceKernel
from benchmarks.gpu.job import Job
from benchmarks.gpu.measure import Timed, measure_sides, rotate_launches, zeroing_side
from benchmarks.gpu.open_rows import NotOpenError, describe_work
from benchmarks.gpu.sizes import REHEARSED

CPU = torch.device("cpu")


def test_a_difference_is_taken_round_by_round() -> None:
    sides = {
        "short": Timed(lambda: time.sleep(0.002)),
        "long": Timed(lambda: time.sleep(0.006)),
        "added": Timed(("long", "short"), 1_000),
    }
    times = measure_sides(sides, 3, 2, CPU)
    for long, short, added in zip(*(times.microseconds[name] for name in ("long", "short", "added")), strict=True):
        assert added == long - short
    assert times.spread("added").median == statistics.median(times.microseconds["added"])
    assert "| added | " in " ".join(times.table(1e9).split())


def test_a_graph_uses_all_copies_in_turn() -> None:
    walked: list[int] = []
    side = rotate_launches([lambda number=number: walked.append(number) for number in range(3)])
    measure_sides({"cold": Timed(side, copies=3)}, 1, 4, CPU)
    assert walked[-6:] == [walked[-6], *[(walked[-6] + i) % 3 for i in range(1, 6)]]


def test_uncertified_rows_are_not_measured_as_certified(kernel: DeviceKernel) -> None:
    logits = logits_on(CPU, 2, 500)
    certified_step(kernel, logits)
    logits[1, 7] = torch.nan
    with pytest.raises(NotCertifiedError, match="1 of 2 rows are not certified"):
        certified_step(kernel, logits)


def test_rows_that_need_no_distance_are_not_measured_as_open(kernel: DeviceKernel) -> None:
    step = certified.Step(kernel, logits_on(CPU, 1, 500), {"uniform": 0.3}, certified._OPTIONS)
    step.launch()
    with pytest.raises(NotOpenError, match="answered by candidates"):
        describe_work(step.samples())


def test_the_sides_zero_the_control_memory(kernel: DeviceKernel) -> None:
    logits = logits_on(CPU, 2, REHEARSED.vocab)
    sides = certified.top_w_sides(kernel, logits, REHEARSED)
    for timed in sides.values():
        if not isinstance(timed.side, tuple):
            timed.side()
    again = certified_step(kernel, logits)  # raises unless it leaves the control memory zero
    assert again.samples().certified.all()


def test_flashinfers_samplers_are_timed_beside_top_w_if_installed(
    emulated_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    called: list[str] = []
    sampling = ModuleType("flashinfer.sampling")
    sampling.top_p_sampling_from_probs = lambda probabilities, top_p: called.append("top-p")  # type: ignore[attr-defined]
    sampling.top_k_top_p_sampling_from_logits = lambda logits, k, p: called.append("top-k")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", sampling)
    job = Job(tmp_path, emulated_library, rehearse=True)
    found = speed.flashinfer(job, 2)
    assert {"top-p", "top-k"} == set(called)
    assert len(found.data["sides"]) == 3
    monkeypatch.setattr("benchmarks.gpu.flashinfer_samplers.capture_graph", refuses)
    found = speed.flashinfer(job, 2)
    assert found.table.count("launched, not captured: operation not permitted") == 2


def test_without_flashinfer_the_step_reports_it(emulated_library: Path, tmp_path: Path) -> None:
    found = speed.flashinfer(Job(tmp_path, emulated_library, rehearse=True), 2)
    assert "FlashInfer is not here" in found.absent[0]


def test_zeroing_sets_every_byte_to_zero() -> None:
    block = torch.ones(300, dtype=torch.uint8)
    zeroing_side(block)()
    assert not block.any()


def test_open_sides_report_their_work(kernel: DeviceKernel) -> None:
    from benchmarks.gpu.tables import random_rows

    sides = open_rows.sides(kernel, random_rows(600, 16, CPU), "mahalanobis", 1, 200)
    assert [name for name, timed in sides.items() if "distances" in timed.note] == [
        "Top-W, mahalanobis, no bound", "Top-W, mahalanobis, nearest neighbours bounded",
    ]  # fmt: skip


def test_the_decoders_product_is_a_certified_row(kernel: DeviceKernel) -> None:
    model = decoder(CPU, REHEARSED.decoder)
    model.step()
    wanted = logits_on(CPU, 1, REHEARSED.decoder[-1])
    torch.testing.assert_close(model.logits.float(), wanted, rtol=2e-2, atol=5e-2)  # float16 sums of 64 products
    certified_step(kernel, model.logits)
