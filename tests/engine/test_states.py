"""Models with other states than the keys and values of all tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import NewEngine
from tests.support.hybrid_models import make_hybrid
from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.engine.batch import Batch
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

FORMS = {"onnxruntime": {}, "standard": {"target": "tensorrt", "max_length": 128}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "form"),
    [("lfm2", "onnxruntime"), ("mamba2", "standard"), ("gemma3", "onnxruntime")],
)
def test_requests_draw_what_they_draw_alone(
    tmp_path: Path, engine_of: NewEngine, family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lfm2 has convolutions and attention, mamba2 recurrences of standard operators, gemma3 a window.

    Steps include free rows and rows whose prompt is being read; with a window, they have only decoding rows.
    """
    exchanged = 0
    exchange = Batch.exchange

    def count_exchange(batch: Batch, one: int, other: int, saves: bool) -> None:
        nonlocal exchanged
        exchanged += 1
        exchange(batch, one, other, saves)

    monkeypatch.setattr(Batch, "exchange", count_exchange)
    source = make_model(family) if family == "gemma3" else make_hybrid(family)
    source.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", **FORMS[form])
    model = TopWModel.from_pretrained(tmp_path / "out", provider="cpu", intra_op_num_threads=1)
    engine = engine_of(model, max_batch=4, max_length=128, prefill_budget=8)
    rng = np.random.default_rng(0)
    given = [
        {
            "prompt": rng.integers(3, 280, int(size)).tolist(),
            "max_new_tokens": int(new),
            "seed": seed,
            "ignore_eos": True,
            **({"repetition_penalty": 1.2} if seed % 4 == 0 else {}),
        }
        for seed, (size, new) in enumerate(zip(rng.integers(1, 60, 24), rng.integers(1, 40, 24), strict=True))
    ]
    requests = [engine.submit(**one) for one in given]
    for one, request in zip(given, requests, strict=True):
        assert request.result(120).token_ids == model.generate(**one).token_ids
    assert exchanged
