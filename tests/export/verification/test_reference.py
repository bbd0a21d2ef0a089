"""The reference does not depend on how tokens are fed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.export.foreign import load_decoder
from topw_deploy.export.verification.decoder import decoder_checks
from topw_deploy.export.verification.reference import OriginalDecoderReference
from topw_deploy.manifest import DecoderInfo, key_value_states

IDS = np.random.default_rng(0).integers(3, 280, 12)
VOCAB = 7


def test_the_makers_decoder_gives_the_same_rows_by_runs_as_at_once(foreign_decoder: Path) -> None:
    file = foreign_decoder / "model.onnx"
    reference = OriginalDecoderReference(file, load_decoder(file, foreign_decoder).info)
    runs = [5, 1, 1, 3, 2]
    found = reference.logits_by_runs(IDS, runs)
    np.testing.assert_allclose(found, reference.logits(IDS)[np.cumsum(runs) - 1], atol=1e-4)
    assert found.dtype == np.float32


class Jumpy:
    """Logits depend on how tokens are fed, as with quantised activations."""

    name = "itself"

    def __init__(self) -> None:
        self._runs: list[int] = []

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return np.stack([self._row([n + 1]) for n in range(len(ids))])

    def logits_by_runs(self, ids: np.ndarray, runs: list[int]) -> np.ndarray:
        assert sum(runs) == len(ids)
        return np.stack([self._row(runs[: n + 1]) for n in range(len(runs))])

    def start(self, batch: int) -> None:
        assert batch == 1
        self._runs = []

    def step(self, ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        assert attention_mask.shape[1] == sum(self._runs) + ids.shape[1]
        self._runs.append(ids.shape[1])
        return self._row(self._runs)[None]

    def _row(self, runs: list[int]) -> np.ndarray:
        return np.random.default_rng(runs).normal(size=VOCAB).astype(np.float32)


def test_like_is_compared_with_like() -> None:
    decoder = DecoderInfo(
        model_type="made",
        kv_form="shared",
        num_layers=1,
        states=key_value_states(0, "float", 1, 8, 8),
        kv_dtype="float",
        context_length=64,
        left_padding=False,
    )
    checks = list(decoder_checks(Jumpy(), Jumpy(), decoder, [IDS, IDS[:4]]))  # type: ignore[arg-type]
    assert [(check.name, check.difference) for check in checks] == [
        ("prefill logits", 0.0),
        ("decode logits", 0.0),
        ("chunked prefill logits", 0.0),
    ]
