"""The command `topw build-engine`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.tensorrt_double import TensorRT
from topw_deploy.cli.main import run, topw


def call(*arguments: str) -> int:
    return run(topw, "topw", "TOPW", ["build-engine", *arguments])


def test_the_engines_path_is_printed_and_its_stamp_as_json(
    trt: TensorRT, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(out), "--max-batch", "2", "--workspace", "2MiB") == 0
    printed = capsys.readouterr()
    path = Path(printed.out.strip())
    assert path.parent == out / "engines"
    assert "TensorRT 10.16.1.11, Double GPU (sm_90), the sampler as a plugin" in printed.err
    assert call(str(out), "--max-batch", "3", "--json", "-q", "--profile", "decode") == 0
    printed = capsys.readouterr()
    stamp = json.loads(printed.out)
    assert (stamp["path"], stamp["profiles"][0]["batch"]["most"], len(stamp["profiles"])) == (str(path), 3, 1)
    assert printed.err == ""


def test_every_option_reaches_the_builder(trt: TensorRT, out: Path, tmp_path: Path) -> None:
    options = ["--max-sequence", "16", "--max-edits", "4", "--timing-cache", str(tmp_path / "timings")]
    assert call(str(out), *options, "--workspace", "1GB", "-q") == 0
    config = trt.configs[0]
    assert config.profiles[1].shapes["input_ids"][2] == [1, 16]
    assert config.profiles[1].shapes["edit_ids"][2] == [1, 4]
    assert list(config.limits.values()) == [10**9]
    assert (tmp_path / "timings").exists()


def test_inspect_lists_engines_and_stamps_that_are_none(
    trt: TensorRT, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(topw, "topw", "TOPW", ["inspect", str(out)]) == 0
    assert "engines" not in capsys.readouterr().out
    assert call(str(out), "--max-batch", "2", "--max-sequence", "16", "-q") == 0
    (out / "engines" / "other.json").write_text("{}")
    (out / "engines" / "half.engine").write_bytes(b"...")
    capsys.readouterr()
    assert run(topw, "topw", "TOPW", ["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "for decode and prefill: 2 rows, 16 tokens and 128 edits of each; sampled by the plugin" in shown
    assert "other.json" in shown
    assert "is not an engine's stamp" in shown
    assert "not used: it has no stamp, so its build was interrupted" in shown


def test_generate_runs_the_engine(trt: TensorRT, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(out), "-q") == 0
    capsys.readouterr()
    options = ["--provider", "tensorrt", "--max-new-tokens", "5", "--seed", "3", "--ignore-eos", "--json"]
    assert run(topw, "topw", "TOPW", ["generate", str(out), "abc", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["sampler"], len(result["token_ids"])) == ("plugin", 5)
    assert sum(context.runs for context in trt.contexts) == 5


def check(*arguments: str) -> int:
    return run(topw, "topw", "TOPW", ["check", *arguments])


def test_check_prints_the_parsers_answer_and_the_next_step(
    trt: TensorRT, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(str(out)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "TensorRT    10.16.1.11: takes all of the graph",
        "sampler     the plugin",
        f"next        topw build-engine {out}",
    ]
    trt.refuses = "no importer\nfor Foo"
    assert check(str(out), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["refusals"] == ["Foo (node in Outer): no importer for Foo"]
    assert report["next_step"] == "export the original model again with --target tensorrt --max-length N"


def test_without_tensorrt_check_names_the_machine_that_has_it(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    assert check(str(out)) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: TensorRT's Python module is not installed; ")
    assert f"there run: topw check {out})" in error
