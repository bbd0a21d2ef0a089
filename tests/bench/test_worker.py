"""The protocol between a benchmark and its worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from topw_deploy.errors import BenchmarkError, ParameterError
from topw_lab import worker as worker_module
from topw_lab.worker import Worker


def test_output_of_libraries_does_not_mix_with_answers_and_each_worker_has_its_own_environment(
    worker_file: Path,
) -> None:
    with Worker("adder", worker_file, {"name": "adder"}, threads=3) as worker:
        assert worker.call("add", a=2, b=3) == 5
        assert worker.call("add", a="x", b="é") == "xé"
        assert worker.call("threads") == "3", "BLAS libraries read it"
        assert str(Path(worker_module.__file__).parent) not in worker.call("path")


def test_an_error_in_a_worker_is_one_sentence_with_the_sides_name_or_this_packages_own(worker_file: Path) -> None:
    with Worker("adder", worker_file, {"name": "adder"}) as worker:
        with pytest.raises(BenchmarkError, match=r"^adder failed: ValueError: two lines; omit it or repair it\.$"):
            worker.call("fail")
        with pytest.raises(ParameterError, match=r"^lam is -1\.$"):
            worker.call("refuse")
        assert worker.call("add", a=1, b=1) == 2
        with pytest.raises(BenchmarkError, match=r"^adder ended with exit code 7: out of luck; "):
            worker.call("die", code=7)


def test_an_interpreter_without_the_library_names_it(tmp_path: Path) -> None:
    path = tmp_path / "worker_file.py"
    path.write_text("import a_library_that_nobody_has\n", encoding="utf-8")
    with pytest.raises(BenchmarkError, match="No module named 'a_library_that_nobody_has'"):
        Worker("peer", path, {}, python=sys.executable)
