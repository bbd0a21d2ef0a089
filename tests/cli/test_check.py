"""`topw check`: text, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.toy_model import Toy, export, export_sampler


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("served") / "out", Toy.random(1), form="scatter", max_length=128)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("refused") / "out", Toy.random(1), form="grouped")


def test_each_verdict_has_a_line_and_the_next_step_is_last(invoke, served: Path) -> None:
    result = invoke("check", served, "--no-ask")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["native", "plugin", "inlined", "needs", "parser", "next"]
    assert "TensorScatter 4" in lines[0]
    assert lines[1].endswith("topw.TopWSample (), or its function where there is none")
    assert lines[-1] == f"next        topw build-engine {served}"


def test_what_is_unsupported_is_named_and_the_exit_code_is_1(invoke, refused: Path) -> None:
    result = invoke("check", refused, "--no-ask")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any(line.startswith("unsupported 2 nodes: com.microsoft.GroupQueryAttention 2") for line in lines)
    assert any("TensorRT supports no operators of com.microsoft" in line for line in lines)
    assert "export again with --target tensorrt --max-length N" in lines[-1]


def test_the_report_as_json_has_every_node(invoke, refused: Path) -> None:
    result = invoke("check", refused, "--target", "onnxruntime", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["target"], report["passed"], report["parser"]) == ("onnxruntime", True, None)
    assert {node["verdict"] for node in report["nodes"]} == {"native", "plugin", "inlined"}


def test_a_sampler_alone_is_not_sent_to_generate(invoke, tmp_path: Path) -> None:
    alone = export_sampler(tmp_path / "sampler", Toy.random(1))
    for target, advice in (("onnxruntime", "topw_deploy.runtime.TopWSampler"), ("tensorrt", "to TensorRT's parser")):
        result = invoke("check", alone, "--target", target, "--no-ask")
        assert result.exit_code == 0
        assert advice in result.stdout.splitlines()[-1]


def test_a_folder_that_is_no_export_is_one_sentence(invoke, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="manifest"):
        invoke("check", tmp_path)
