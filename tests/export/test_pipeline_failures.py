"""A failed export leaves nothing that loads. A killed one: tests/attacks/test_kills.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.errors import (
    ExportError,
    ManifestError,
    VerificationError,
)
from topw_deploy.export import pipeline
from topw_deploy.manifest import Verification, load_manifest
from topw_deploy.runtime import TopWModel


@pytest.mark.slow
def test_a_failed_verification_leaves_nothing_and_an_earlier_export_alone(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is damaged after the sampler is attached, so only the verification can detect it."""
    export(foreign_decoder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write = pipeline.write_model

    def spoil(model: ir.Model, folder: Path, *rest: Any) -> dict[str, str]:
        value = next(v for v in model.graph.initializers.values() if v.shape == ir.Shape([48, 32]))
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.5), name=value.name)
        return write(model, folder, *rest)

    monkeypatch.setattr(pipeline, "write_model", spoil)
    with pytest.raises(VerificationError, match=r"checks failed \(first: prefill logits"):
        export(foreign_decoder, tmp_path / "out", verify=True, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    with pytest.raises(VerificationError, match="checks failed"):
        export(foreign_decoder, tmp_path / "new", verify=True, keep_failed=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ManifestError, match="verification did not finish"):
        TopWModel.from_pretrained(tmp_path / "new.failed")


@pytest.mark.slow
def test_nan_weights_fail_the_check_of_logits(tmp_path: Path) -> None:
    model = make_model("llama_tied")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    with pytest.raises(VerificationError, match=r"checks (had )?failed.*prefill logits"):
        export(tmp_path / "model", tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()


def test_an_export_fails_if_its_verification_dies(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(VerificationError, match="ended with exit code 1"):
        export(foreign_decoder, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full)
    with pytest.raises(ExportError, match="disk is full"):
        export(foreign_decoder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cold_verification")
def test_the_verification_is_in_the_manifest(tmp_path: Path, foreign_decoder: Path) -> None:
    report = export(foreign_decoder, tmp_path / "out", verify=True)
    assert load_manifest(tmp_path / "out").verification == report.verification
    assert report.verification != Verification(status="skipped")
