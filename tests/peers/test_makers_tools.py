"""An import with `logits` behaves the same in its maker's tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from .models import DIM, HEADS, WINDOW

pytestmark = pytest.mark.long

PROMPTS = [[5, 9, 30, 44], [200, 6, 61, 7]]
GENAI = (
    "genai-llama-tied",
    "genai-llama-untied",
    "genai-int4-llama-tied",
    "genai-int4-llama-untied",
    "genai-fp16-llama-tied",
    "genai-gemma2",
    "mobius-cpu-llama-tied",
    "mobius-cpu-mistral",
)


@pytest.mark.parametrize("rows", [1, 2])
def test_onnxruntime_genai_generates_the_same_tokens_as_before(
    imported: Callable, own_tool: Callable, rows: int
) -> None:
    exports = [imported(name) for name in GENAI]
    folders = [path for export in exports for path in (export.source.path, export.path)]
    answers = own_tool("genai", folders, PROMPTS[:rows], 2 * WINDOW)
    for export, before, after in zip(exports, answers[::2], answers[1::2], strict=True):
        assert after == before, export.source.name
        assert len(before) == rows


def test_optimum_generates_the_same_tokens_as_before(imported: Callable, own_tool: Callable) -> None:
    exports = [imported(f"optimum-{model}") for model in ("llama-tied", "llama-untied", "mistral", "gpt2")]
    folders = [path for export in exports for path in (export.source.path, export.path)]
    answers = own_tool("optimum", folders, PROMPTS, 2 * WINDOW)
    for export, before, after in zip(exports, answers[::2], answers[1::2], strict=True):
        assert after == before, export.source.name


@pytest.mark.parametrize("name", ["mobius-llama-tied", "mobius-llama-untied", "mobius-gemma3"])
def test_onnxruntime_alone_gives_the_logits_it_gave_before(imported: Callable, name: str) -> None:
    """As in mobius's examples."""
    export = imported(name)
    ids = np.array(PROMPTS)
    before, after = (logits(path, ids) for path in (export.source.path, export.path))
    np.testing.assert_array_equal(after, before)


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """All positions, empty cache, only a decoder's own inputs."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            feeds[value.name] = np.zeros((len(ids), HEADS, 0, DIM), np.float32)
    (found,) = session.run(["logits"], feeds)
    return np.asarray(found)
