"""`topw bench`: what goes to which stream and file, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.toy_model import Toy, export
from topw_deploy.cli.main import topw
from topw_deploy.errors import ParameterError
from topw_lab.bench.report import comparison, duration, significant

Invoke = Callable[..., Result]
SMALL = ("--vocab", 300, "--hidden", 4, "--rounds", 2, "--peers", "torch,max")


@pytest.fixture
def bench() -> Invoke:
    def run(*arguments: object) -> Result:
        extra: dict[str, Any] = {"auto_envvar_prefix": "TOPW"}
        return CliRunner().invoke(topw, ["bench", *map(str, arguments)], **extra)

    return run


@pytest.mark.slow
def test_the_table_goes_to_stdout_and_progress_to_stderr(bench: Invoke, tmp_path: Path) -> None:
    done = bench("sampler", *SMALL, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert done.exit_code == 0
    assert done.stdout.count("| Top-W torch") == 2
    assert "Comparing kept sets" in done.stderr
    assert "Comparing" not in done.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["cases"]) == 2
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_with_quiet_and_json_to_stdout_nothing_else_is_printed(bench: Invoke) -> None:
    done = bench("sampler", *SMALL, "--quiet", "--json", "-", "--temperature", "1.5")
    assert done.stderr == ""
    (case,) = json.loads(done.stdout)["cases"]
    assert case["parameters"]["temperature"] == 1.5


@pytest.mark.slow
def test_the_decoding_loop_is_timed_on_an_export(bench: Invoke, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(1))
    done = bench(
        "decode", folder, "--prompt-tokens", 4, "--new-tokens", 3, "--rounds", 1, "--peers", "topw-graph,argmax"
    )
    assert done.exit_code == 0, done.output
    assert "| TopWModel, graph" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--regime", "hot"), "'hot' is not one of certified, flat, uncertified."),
        (("--temperature", "1,warm"), "'1,warm' is not a comma-separated list of temperatures."),
        (("--rounds", "0"), "0 is not in the range x>=1"),
        (("--authors", "/no/such/file.py"), "does not exist"),
        (("--peers", ","), "the value is empty, but must list sides."),
    ],
)
def test_a_wrong_argument_is_a_usage_error(bench: Invoke, arguments: tuple[str, ...], message: str) -> None:
    done = bench("sampler", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_file_without_the_authors_class_is_refused(bench: Invoke, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Other: ...\n")
    done = bench(
        "sampler", "--vocab", 300, "--hidden", 4, "--quiet", "--peers", "authors,max", "--authors", tmp_path / "mine.py"
    )
    assert done.exit_code == 1
    assert str(done.exception).endswith("mine.py has no TopW_LogitsProcessor; give the authors' logit_processor_w1.py.")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["import nothing_that_is_there\n", "\0"])
def test_an_authors_file_that_does_not_load_is_named(bench: Invoke, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    done = bench("sampler", *SMALL[:-1], "authors", "--quiet", "--authors", tmp_path / "mine.py")
    assert done.exit_code == 1
    assert "mine.py does not load (" in str(done.exception)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--json", "none/out.json", "none is not a folder; choose another name"),
        ("--plot", "none/out.png", "none is not a folder; choose another name"),
        ("--plot", "out.svg", r"must end in \.png"),
        ("--plot", "out", r"must end in \.png"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_timed(
    bench: Invoke, tmp_path: Path, option: str, name: str, message: str
) -> None:
    for command in (("sampler", *SMALL), ("decode", tmp_path)):
        done = bench(*command, option, tmp_path / name)
        assert isinstance(done.exception, ParameterError)
        assert re.search(message, str(done.exception))
        assert done.stdout == done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("--temperature", "1e+300"), ("--geom-scale", "-1e+39")])
def test_a_number_that_float32_cannot_hold_is_refused(bench: Invoke, option: str, value: str) -> None:
    done = bench("sampler", *SMALL, f"{option}={value}")
    assert isinstance(done.exception, ParameterError)
    assert re.search(rf"is {re.escape(value)}, but must be .* in float32 too", str(done.exception))


def test_the_help_lists_every_benchmark(bench: Invoke) -> None:
    shown = bench("--help").stdout
    for name in ("sampler", "decode", "serve", "rules"):
        assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.0, "1.00"),
        (17.44, "17.4"),
        (99.96, "100"),
        (1234.5, "1,230"),
        (0.9996, "1.00"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(17.4e-6, "17.4 us"), (2e-3, "2.00 ms"), (3.0, "3.00 s"), (2e-8, "0.0200 us")]
)
def test_a_duration_has_the_unit_that_fits(value: float, text: str) -> None:
    assert duration(value) == text


def test_a_comparison_names_the_faster_side() -> None:
    assert comparison({"a": 560.4, "b": 0.5, "c": 12.0}) == "560x faster than a, 12x than c, 2.0x slower than b"
    assert comparison({}) == ""
