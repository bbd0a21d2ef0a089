"""`topw-export` and `topw verify`."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner, Result

from tests.support.tiny_models import VOCAB
from topw_deploy.cli import main
from topw_deploy.cli.export import _verdict
from topw_deploy.cli.export import verify as verify_command
from topw_deploy.errors import VerificationError
from topw_deploy.export.options import ExportReport
from topw_deploy.export.verification import run as run_module
from topw_deploy.manifest import Check, NotCompared, Verification, load_manifest
from topw_deploy.plugins.library import why_absent
from topw_deploy.progress import Progress


@dataclass(frozen=True)
class Done:
    """Exit code and output."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Done:
    runner = CliRunner()
    with runner.isolation() as (out, err, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # `main.run` replaces it
        code = main.run(None, "topw-export", "TOPW_EXPORT", [str(argument) for argument in arguments])
        assert err is not None
        return Done(code, out.getvalue().decode(), err.getvalue().decode())


@pytest.mark.slow
def test_progress_goes_to_stderr_and_the_result_to_stdout(tmp_path: Path, foreign_decoder: Path) -> None:
    result = run(foreign_decoder, tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'out'}\n"
    assert re.search(r"^Attaching the sampler \(.*\): \d+\.\d s$", result.stderr, re.MULTILINE)
    assert "[✓]" not in result.stderr
    seconds = re.search(r"^Verifying: (.* s)$", result.stderr, re.MULTILINE)
    assert seconds is not None
    assert result.stderr.splitlines()[-2:] == [
        f"Verified: 12 checks in {seconds[1]}",
        f'Next: topw generate {tmp_path / "out"} "Once upon a time"',
    ]


@pytest.mark.slow
def test_verbose_shows_every_check(tmp_path: Path, foreign_decoder: Path) -> None:
    result = run(foreign_decoder, tmp_path / "out", "-v")
    assert result.stderr.count("[✓]") == 12
    median = load_manifest(tmp_path / "out").median_distance
    assert median is not None
    assert f"median distance of likely pairs: {median:.4g}" in result.stderr
    assert re.search(r"^Verifying: .* s$", result.stderr, re.MULTILINE)  # again, below its checks


@pytest.mark.slow
def test_a_failed_verification_shows_its_checks(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(progress: Progress) -> None:
        progress.say("  -[x] generation: 2 (bound 0; 8 tokens)")
        raise VerificationError("1 of 12 checks failed.")

    monkeypatch.setattr(run_module, "verify_in_subprocess", lambda *arguments: check(arguments[-1]))
    result = run(foreign_decoder, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "\nVerifying\n  -[x] generation: 2 (bound 0; 8 tokens)\nError: 1 of 12 checks failed.\n"
    )


def test_the_last_lines_say_what_was_not_verified(tmp_path: Path, foreign_decoder: Path) -> None:
    result = run(foreign_decoder, tmp_path / "out", "--no-verify")
    assert result.stderr.splitlines()[-2] == "Not verified, because of --no-verify"
    missing = Verification(
        status="partial",
        checks=(Check(name="sampler", difference=0.0, bound=1.0, passed=True, detail=""),),
        not_compared=(NotCompared("generation", "no kernels"),),
    )
    report = cast("ExportReport", SimpleNamespace(verification=missing))
    verdict = "Verified in part: 1 check in 2.0 s; not compared: generation"
    assert _verdict(report, {"Verifying": 2.0, "Tracing": 1.0}) == verdict


def test_the_result_as_json(tmp_path: Path, foreign_decoder: Path) -> None:
    result = run(foreign_decoder, tmp_path / "out", "--json", "--no-verify", "-q")
    report = json.loads(result.stdout)
    assert report["model_type"] == "llama"
    assert set(report["files"]) > {"model.onnx", "model.onnx.data", "tokenizer.json"}
    assert "Writing" not in result.stderr


@pytest.mark.parametrize("spelling", ["kebab", "snake"])
def test_both_spellings_and_every_top_w_name_parse(tmp_path: Path, foreign_decoder: Path, spelling: str) -> None:
    options = (
        "--no-verify --with-mass --top-m 40 --alt-iters 5 --metric cosine --potential knn --knn-k 3 --preset released "
        "--lambda-geom 1.5 --beta 2.5 --warm-p 0.9 --selection-temperature 0.5 --no-branches"
    )
    if spelling == "snake":
        options = " ".join("--" + o[2:].replace("-", "_") if o.startswith("--") else o for o in options.split())
    result = run("-m", foreign_decoder, "--output", tmp_path / "out", *options.split())
    assert result.exit_code == 0, result.stderr
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.defaults.lam, manifest.defaults.init_top_p) == (1.5, 0.9)
    assert manifest.defaults.geom_scale == 0.6  # from the preset
    assert (manifest.sampler.options.top_m, manifest.sampler.options.alt_iters) == (40, 5)
    assert manifest.sampler.options.neighbours == 3
    assert not manifest.sampler.branches


def test_a_dry_run_lists_inputs_outputs_and_sizes(tmp_path: Path, foreign_decoder: Path) -> None:
    result = run(foreign_decoder, tmp_path / "out", "--dry-run", "--with-keep-mask")
    assert result.exit_code == 0
    assert f"keep_mask  bool  [batch_size, {VOCAB}]" in result.stdout
    assert "kB of weights" in result.stdout
    assert "states of a sequence:\n  full  256 bytes a token\n" in result.stdout
    data = (foreign_decoder / "model.onnx.data").stat().st_size
    assert f"({data:,} bytes)" in result.stdout.split("files:")[1].split("peak memory:")[0]
    assert [line.split()[0] for line in result.stdout.split("peak memory:")[1].strip().splitlines()] == [
        "graph",
        "writing",
        "verification",
    ]
    assert not (tmp_path / "out").exists()


def test_failures_are_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    result = run(tmp_path / "missing" / "model", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "does not exist" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["tiny"], ["tiny", "out", "-m", "tiny"], ["tiny", "out", "--unknown"], ["tiny", "out", "--dtype", "x"]],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, foreign_decoder: Path) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run(foreign_decoder, out, "--no-verify").exit_code == 0
    return out


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(verify_command, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_verify_repeats_hashes_and_checks(finished: Path, foreign_decoder: Path) -> None:
    result = verify(finished, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    of_native = [check for check in report["checks"] if check["name"].startswith("native sampler")]
    assert len(report["checks"]) - len(of_native) == 11  # unverified: padding was not promised
    assert all(check["passed"] for check in report["checks"])
    if why_absent():
        assert report["skipped"] == [["native sampler", why_absent()]]
    else:
        assert (len(of_native), report["skipped"]) == (6, [])


@pytest.mark.slow
def test_verify_names_what_it_cannot_compare_with(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPW_NATIVE", "0")
    result = verify(finished, "--source", "./gone")
    assert result.exit_code == 0
    assert "generation: not compared, the source is not available" in result.stderr
    assert ".)" not in result.stderr
    assert "native sampler: not compared, TOPW_NATIVE=0 disables it" in result.stderr
    assert "6 checks passed, 3 not compared" in result.stdout


@pytest.mark.slow
def test_verify_notices_a_changed_file(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    data = tmp_path / "out" / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    result = verify(tmp_path / "out", "--hashes-only")
    assert result.exit_code == 1
    assert "model.onnx.data has SHA-256" in str(result.exception)
