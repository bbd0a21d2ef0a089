"""The TensorRT commands of docs/guide/edge.md run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.test_edge_guide import PAGE, commands, export_once
from topw_deploy.cli.engines import build_engine

from .conftest import run_worker

pytestmark = pytest.mark.long


def test_the_page_s_export_is_built_by_the_page_s_command(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (export,) = (line for line in commands("") if line.startswith("topw-export") and "--target tensorrt" in line)
    assert "--max-length" not in export
    export_once(export, tmp_path, tmp_path_factory)
    (line,) = (line for line in PAGE.splitlines() if line.startswith("topw build-engine"))
    request = build_engine.make_context("build-engine", shlex.split(line)[2:]).params
    for name in ("as_json", "quiet"):
        del request[name]
    (answer,) = run_worker("engine_worker.py", tmp_path, [{**request, "plugin": "none"}])
    assert "error" not in answer, answer
    assert len(answer["stamp"]["profiles"]) == 2
    assert (tmp_path / "timing.cache").stat().st_size > 0
