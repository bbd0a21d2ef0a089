"""Every family and lowering agrees with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.support.lowerings import CONTEXT, LOWERINGS, copy_of, driver_of, lowered
from tests.support.samples import sampled
from tests.support.tiny_models import FAMILIES, WINDOW, make_model
from tests.support.traces import trace
from topw_deploy.export.trace.placeholders import attention_placeholders
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import lower
from topw_deploy.export.verification import worker
from topw_deploy.export.verification.reference import CacheDriver
from topw_deploy.manifest import Check, load_decoder_manifest

pytestmark = pytest.mark.slow

SAMPLE = ("llama_tied", "llama_untied", "gpt2", "gemma3")
LONG = ("phi3", "gemma2", "qwen3_moe")  # the others are broad
FLOAT32 = 1e-4  # the export's bound; measured: below 3e-6
LENGTHS = (7, 90, 1, 40)  # ten sliding windows at most
# GroupQueryAttention rotates these; the others have heads of 8 numbers.
ROTATED_INSIDE = {"llama_untied", "qwen2", "qwen3", "phi3", "mistral"}
FUSED = {"llama_untied", "qwen2", "phi3", "mistral", "gpt2"}


@dataclass(frozen=True)
class Wanted:
    """What torch computes.

    sequences: token ids.
    logits: those of each sequence, [tokens, vocab].
    """

    sequences: Sequence[np.ndarray]
    logits: Sequence[np.ndarray]


@cache
def wanted_of(family: str) -> Wanted:
    generator = np.random.default_rng(1)
    model = make_model(family)
    sequences = [generator.integers(3, 300, length) for length in LENGTHS]
    with torch.no_grad():
        return Wanted(sequences, [model(input_ids=torch.from_numpy(s)[None]).logits[0].numpy() for s in sequences])


@cache
def traced(family: str) -> TracedDecoder:
    return trace(make_model(family))


@pytest.fixture(scope="module", params=sampled(FAMILIES, SAMPLE, LONG))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=LOWERINGS)
def lowering(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def driver(family: str, lowering: str) -> CacheDriver:
    return driver_of(*lowered(traced(family), lowering))


def padded(sequences: Sequence[np.ndarray], side: str) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, sequences))
    ids, mask = np.full((len(sequences), width), 17, np.int64), np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, 1
    return ids, mask


@pytest.mark.parametrize("chunks", [[90], [1] * 90, [30, 20, 39, 1]], ids=["prefill", "decode", "chunks"])
def test_one_sequence_agrees_with_torch_for_all_chunks(driver: CacheDriver, family: str, chunks: list[int]) -> None:
    ids, wanted = wanted_of(family).sequences[1], wanted_of(family).logits[1]
    driver.start(1)
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = driver.step(ids[None, start:end], np.ones((1, end), np.int64))
        np.testing.assert_allclose(found[0], wanted[end - 1], atol=FLOAT32)


@pytest.mark.parametrize("chunks", [[90], [30, 20, 39, 1]], ids=["whole", "chunks"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_a_batch_agree_with_torch_alone(
    driver: CacheDriver, family: str, side: str, chunks: list[int]
) -> None:
    wanted = wanted_of(family)
    ids, mask = padded(wanted.sequences, side)
    driver.start(len(ids))
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = driver.step(ids[:, start:end], mask[:, :end])
        assert np.isfinite(found).all()  # also in rows of padding
        for row, rows in enumerate(wanted.logits):
            if mask[row, start:end].any():
                np.testing.assert_allclose(found[row], rows[mask[row, :end].sum() - 1], atol=FLOAT32)


def test_rows_padded_on_the_right_continue_after_a_gap(driver: CacheDriver, family: str) -> None:
    wanted = wanted_of(family)
    ids, mask = padded([sequence[:-1] if len(sequence) > 1 else sequence for sequence in wanted.sequences], "right")
    driver.start(len(ids))
    driver.step(ids, mask)
    mask = np.concatenate([mask, np.ones((len(ids), 1), np.int64)], axis=1)
    found = driver.step(np.array([[sequence[-1]] for sequence in wanted.sequences]), mask)
    for row, rows in enumerate(wanted.logits):
        if len(rows) > 1:
            np.testing.assert_allclose(found[row], rows[-1], atol=FLOAT32)


def test_inputs_and_operators_are_those_of_the_lowering(family: str, lowering: str) -> None:
    decoder, form = lowered(traced(family), lowering)
    kinds = [node.op_type for node in decoder.model.graph]
    inputs = {value.name for value in decoder.model.graph.inputs if not (value.name or "").startswith("past")}
    assert (form.notice is None) == (lowering != "scatter")  # says what NVIDIA's parser needs
    if lowering == "concat":
        assert (form.kv_form, form.ragged_chunks, form.buffer_step) == ("concat", True, 0)
        assert inputs - {"position_ids"} == {"input_ids", "attention_mask"}
        return
    assert form.kv_form == "static"
    on_host = {"total_sequence_length"} if lowering == "group_query" else set()
    assert inputs == {"input_ids", "write_indices", "row_lengths"} | on_host
    layers = decoder.num_layers
    if lowering == "group_query":
        assert (form.attention, form.ragged_chunks, form.buffer_step) == ("GroupQueryAttention", False, 0)
        assert kinds.count("GroupQueryAttention") == layers
        assert kinds.count("RotaryEmbedding") == (0 if family in ROTATED_INSIDE | {"gpt2"} else 2 * layers)
        fused = [n for n in decoder.model.graph if n.op_type == "GroupQueryAttention" and n.inputs[1] is None]
        assert len(fused) == (layers if family in FUSED else 0)
        position_sum = family == "gpt2"  # position embeddings
        assert sum(kind.startswith("Skip") for kind in kinds) == 2 * layers + position_sum
    else:
        assert (form.attention, form.ragged_chunks, form.buffer_step) == ("Attention", True, 64)
        assert kinds.count("TensorScatter") == 2 * layers
        assert {node.domain for node in decoder.model.graph} == {""}
        assert decoder.model.opset_imports[""] == 24


@pytest.mark.long
def test_every_check_of_the_verification_passes(
    family: str, exported: Callable[[str], Path], checkpoint: Callable[[str], Path]
) -> None:
    folder = exported(family)
    task = {"folder": str(folder), "checkpoint": str(checkpoint(family))}
    results = list(worker.run(task))
    assert all(isinstance(result, Check) and result.passed for result in results), results
    assert len(results) == (13 if load_decoder_manifest(folder).decoder.kv_form == "static" else 12)
    assert max(r.difference for r in results if isinstance(r, Check) and r.name.endswith("logits")) <= FLOAT32


def test_each_layer_leaves_one_placeholder_with_its_window_and_cap() -> None:
    nodes = attention_placeholders(traced("gemma2").model.graph)
    assert [node.attributes["window"].as_int() for node in nodes] == [WINDOW, 0]
    assert all(node.attributes["softcap"].as_float() == 2.0 for node in nodes)


@pytest.mark.parametrize(
    ("name", "value"), [("window", ir.AttrInt64("window", 0)), ("softcap", ir.AttrFloat32("softcap", 0.0))]
)
def test_losing_the_window_or_the_cap_changes_logits_beyond_the_bound(lowering: str, name: str, value: ir.Attr) -> None:
    outputs = []
    for lose in (False, True):
        decoder = copy_of(traced("gemma2"))
        for node in attention_placeholders(decoder.model.graph):
            if lose:
                node.attributes[name] = value
        driver = driver_of(decoder, lower(decoder, context_length=CONTEXT, **LOWERINGS[lowering]))
        driver.start(1)
        outputs.append(driver.step(np.arange(3, 43)[None], np.ones((1, 40), np.int64)))
    assert np.abs(outputs[0] - outputs[1]).max() > 10 * FLOAT32
