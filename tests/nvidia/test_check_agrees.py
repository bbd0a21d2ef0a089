"""`topw check`'s table agrees with NVIDIA's parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import export, write_checkpoint

from .conftest import Ask

pytestmark = pytest.mark.long

REFUSED = {
    "for-onnxruntime": {},
    "quantised": {"dtype": "int4"},
    "any-length": {"target": "tensorrt", "max_length": 0},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checked") / "llama", "llama_untied")


def test_what_the_table_refuses_the_parser_refuses(nvidia: Ask, checkpoint: Path, tmp_path: Path) -> None:
    for name, settings in REFUSED.items():
        export(checkpoint, tmp_path / name, **settings)
    answers = nvidia([{"check": str(tmp_path / name)} for name in REFUSED])
    for name, answer in zip(REFUSED, answers, strict=True):
        assert not answer["passed"], name
        assert not answer["takes"], name
        first = answer["refusals"][0].split()[0]
        assert any(operator.endswith(first) for operator in answer["unsupported"]), (name, answer)


def test_the_tail_for_onnxruntime_is_taken_with_the_plugin_alone(nvidia: Ask, checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "out", target="tensorrt", max_length=64, tail="onnxruntime")
    (without,) = nvidia([{"check": str(tmp_path / "out")}])
    assert without["needs_plugin"]
    assert not without["takes"]
    (plugged,) = nvidia([{"check": str(tmp_path / "out")}], plugin="python")
    assert plugged["needs_plugin"]
    assert plugged["plugin"]
    assert plugged["takes"]
    assert plugged["passed"]
