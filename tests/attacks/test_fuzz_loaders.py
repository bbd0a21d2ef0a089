"""A few random inputs for each loader; `make fuzz-loaders` is the long run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.loaders.targets import LOADERS, Loader
from fuzz.loaders.worker import Run, run_random
from topw_deploy.errors import PromptError

INPUTS = 40


def count_down(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


@pytest.mark.long
@pytest.mark.parametrize("name", LOADERS)
def test_random_inputs_are_read_or_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "scratch").mkdir()
    run = Run(name, tmp_path, tmp_path / "scratch")
    run_random(run, random.Random(0), count_down(INPUTS))
    assert not run.findings
    assert run.inputs == INPUTS + len(run.loader.seeds)
    assert run.refused > INPUTS // 4  # inputs are not all valid
    assert run.refused < run.inputs  # nor all refused


def test_other_errors_are_findings_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> None:
        if data.startswith(b"wrong"):
            raise KeyError("inside")
        raise PromptError("line 5 of 'x' is wrong.")

    monkeypatch.setitem(LOADERS, "prompts", lambda _: Loader(read, (b"",)))
    run = Run("prompts", tmp_path, tmp_path)
    assert [run(data) for data in (b"a", b"wrong", b"wrong again")] == [
        "PromptError: line  of  is wrong.",
        *[f"finding: KeyError at test_fuzz_loaders.py:{read.__code__.co_firstlineno + 2}: \"'inside'\""] * 2,
    ]
    (path,) = run.findings.values()
    assert Path(path).read_bytes() == b"wrong"
    assert "KeyError" in (tmp_path / "prompts.json").read_text()
