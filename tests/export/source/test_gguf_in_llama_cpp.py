"""llama.cpp computes with the same weights from the same files.

It keeps keys and values in float16, and rounds activations to 8 bits before products with quantised weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.export.source.gguf_files import CONFIGS, EXACT, WITH_MINIMA, logits_in_llama_cpp, write_gguf
from tests.support.tiny_models import WINDOW
from topw_deploy.export.source.checkpoint import load_reference
from topw_deploy.export.source.resolve import resolve

pytestmark = pytest.mark.long

LIKELY = 1e-5  # the least probability of the tokens that are compared
IGNORED_WINDOW = ("phi3", "starcoder2")  # llama.cpp attends to all tokens of these


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy())


def both(file: Path, ids: list[int], scratch: Path) -> tuple[np.ndarray, np.ndarray]:
    """(torch's log-probabilities with the decoded weights, llama.cpp's), float64 [tokens, vocabulary]."""
    model = load_reference(resolve(str(file)).folder, "float32")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    return log_softmax(expected), log_softmax(logits_in_llama_cpp(file, ids, scratch))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_is_the_same_model_in_llama_cpp(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", name)
    ids = list(range(3, 3 + (WINDOW if name in IGNORED_WINDOW else 24)))
    expected, found = both(tmp_path / "model.gguf", ids, tmp_path)
    likely = expected > np.log(LIKELY)
    assert np.abs(expected - found)[likely].max() < 0.04  # the largest found is 0.023


@pytest.mark.parametrize("kind", [*EXACT, *WITH_MINIMA])
def test_a_type_is_decoded_as_in_llama_cpp(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", kind)
    expected, found = both(tmp_path / "model.gguf", list(range(3, 27)), tmp_path)
    expected, found = (values - values.mean(axis=1, keepdims=True) for values in (expected, found))
    # the share of the variance that is not the same; rounded activations of random blocks make it up to 0.003
    assert ((expected - found) ** 2).sum() / (expected**2).sum() < 0.01
