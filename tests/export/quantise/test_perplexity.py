"""The perplexity bound rejects bad rounding and accepts good."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.samples import broad
from topw_deploy.export import export_model
from topw_deploy.export.verification import quantised as texts
from topw_deploy.export.verification.quantised import (
    PERPLEXITY_BOUNDS,
    UNTRAINED_BOUND,
    EvaluationText,
    Loss,
    evaluation_text,
    perplexity_check,
    quantised_checks,
)
from topw_deploy.export.verification.reference import TorchReference, decoder_driver
from topw_deploy.export.verification.sampler import graph_geometry
from topw_deploy.manifest import Check, Note, load_decoder_manifest
from topw_deploy.tiny import TINY_MODEL

pytestmark = pytest.mark.slow

Change = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """options -> the demo's int4 export."""
    made: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        name = "-".join(map(str, options.values())) or "as-it-comes"
        if name not in made:
            made[name] = tmp_path_factory.mktemp("demo") / name
            export_model("tiny", made[name], dtype="int4", verify=False, **options)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    return TorchReference(TINY_MODEL, "float32", None, False)


def change_initializers(folder: Path, target: Path, part: str, ending: str, change: Change) -> Path:
    """Apply `change` to initializers whose names contain `part` and `ending`."""
    shutil.copytree(folder, target)
    model = ir.load(target / "model.onnx")
    found = [v for n, v in model.graph.initializers.items() if n is not None and part in n and n.endswith(ending)]
    assert found
    for value in found:
        assert value.const_value is not None
        value.const_value = ir.tensor(change(value.const_value.numpy()), name=value.name)
    ir.save(model, target / "model.onnx")
    return target


def measure_perplexity(folder: Path, reference: TorchReference, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr(texts, "_LARGEST_BUDGET", 1024)
    manifest = load_decoder_manifest(folder)
    text = evaluation_text(folder, manifest, reference.parameters)
    assert text is not None
    geometry = graph_geometry(folder, manifest.sampler.options, manifest.sampler.vocab_size)
    probe = decoder_driver(folder, manifest.decoder)
    check = next(quantised_checks(probe, reference, text, manifest, (geometry, geometry)))
    assert isinstance(check, Check)
    return check


@pytest.mark.long
def test_the_default_options_stay_well_under_the_bound(
    exported: Callable[..., Path],
    reference: TorchReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = measure_perplexity(exported(), reference, monkeypatch)
    assert check.passed
    assert check.bound == PERPLEXITY_BOUNDS["int4"]
    assert check.difference < check.bound / 2


def swap_halves(codes: np.ndarray) -> np.ndarray:
    return (codes << 4) | (codes >> 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "ending", "change"),
    [
        ("model.layers.1.", "_scales", lambda scales: scales * np.float32(1.2)),
        ("model.layers.1.mlp.gate_proj", "_Q4", swap_halves),
        broad("model.layers.2.", "_Q4", lambda codes: codes[::-1].copy()),
    ],
    ids=["scales a fifth too large in a layer", "the codes of a byte swapped in a matrix", "rows reversed in a layer"],
)
def test_a_badly_rounded_export_is_refused(
    part: str,
    ending: str,
    change: Change,
    exported: Callable[..., Path],
    reference: TorchReference,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = change_initializers(exported(), tmp_path / "wrong", part, ending, change)
    assert not measure_perplexity(folder, reference, monkeypatch).passed


def judge_loss(folder: Path, loss: Loss) -> Check:
    text = EvaluationText(np.zeros((4, 256), np.int64), 1, "text")
    check = perplexity_check(loss, load_decoder_manifest(folder), text)
    assert isinstance(check, Check)
    return check


@pytest.mark.long
def test_an_excess_within_the_standard_error_passes(exported: Callable[..., Path]) -> None:
    bound = PERPLEXITY_BOUNDS["int4"]
    assert judge_loss(exported(), Loss(3.0, 3.0 + bound + 0.01, error=0.01)).passed
    assert not judge_loss(exported(), Loss(3.0, 3.0 + bound + 0.01, error=0.004)).passed
    assert "standard error 0.004" in judge_loss(exported(), Loss(3.0, 3.1, error=0.004)).detail
    assert "1020 tokens" in judge_loss(exported(), Loss(3.0, 3.1, error=0.004)).detail


def test_a_model_that_only_guesses_passes_no_check_but_can_fail_one(exported: Callable[..., Path]) -> None:
    manifest, text = load_decoder_manifest(exported()), EvaluationText(np.zeros((4, 256), np.int64), 1, "text")
    guessing = float(np.log(manifest.sampler.vocab_size)) + 0.1
    note = perplexity_check(Loss(guessing, guessing + 0.5, error=0.01), manifest, text)
    assert isinstance(note, Note)
    assert "no better than guessing" in note.text
    failed = judge_loss(exported(), Loss(guessing, guessing + UNTRAINED_BOUND + 0.1, error=0.01))
    assert (failed.passed, failed.bound) == (False, UNTRAINED_BOUND)
    assert not judge_loss(exported(), Loss(guessing, float("nan"), error=float("nan"))).passed


@pytest.mark.long
def test_every_row_starts_with_the_tokenizers_prefix(exported: Callable[..., Path]) -> None:
    manifest = load_decoder_manifest(exported())
    text = evaluation_text(exported(), manifest, 4_000_000)
    assert text is not None
    assert text.rows.shape == (16, 256)
    assert text.prefix == 1
    assert (text.rows[:, 0] == 0).all()
    assert "manual" in text.name  # the page alone has 600 tokens
