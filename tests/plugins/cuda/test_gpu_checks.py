"""The checks that `python -m benchmarks.gpu` makes on a GPU, on the emulated kernels: that they pass, and can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gpu import checks
from benchmarks.gpu.device import DeviceKernel

from topw_deploy.plugins.kernel import STAGES


@pytest.fixture
def kernel(emulated_library: Path) -> DeviceKernel:
    return DeviceKernel(emulated_library, torch.device("cpu"))


def test_the_rows_take_every_way(kernel: DeviceKernel) -> None:
    step = checks.step_of(kernel, 24, 1, 2_000)
    step.launch()
    assert {STAGES[stage] for stage in step.samples().reports["stage"]} == set(STAGES)


def test_rows_answer_the_same_again(kernel: DeviceKernel) -> None:
    assert checks.repeats(kernel, 2, 24, 2_000)


def test_a_row_answers_alone_as_in_a_batch(kernel: DeviceKernel) -> None:
    assert checks.batch_does_not_matter(kernel, 24, 2_000)


def test_answers_that_differ_are_noticed(kernel: DeviceKernel) -> None:
    found = []
    for seed in (1, 2):
        step = checks.step_of(kernel, 4, seed, 2_000)
        step.launch()
        found.append(step.samples())
    assert checks.same(found[0], found[0])
    assert not checks.same(*found)


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import __main__

    monkeypatch.setattr("sys.argv", ["benchmarks.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="nothing was checked"):
        __main__.main()
    assert capsys.readouterr().out == ""
