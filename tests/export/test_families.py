"""Every family exports, agrees with torch and generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from tiny_models import FAMILIES, WINDOW, make_model

from topw_deploy.export.lowering.concat import lower
from topw_deploy.export.trace import TracedDecoder, marker_nodes, trace
from topw_deploy.export.verification import worker
from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.manifest import Check, load_manifest

FLOAT32 = 1e-4  # what an export promises; measured differences are near 1e-6
LENGTHS = (7, 90, 1, 40)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sequences_and_logits(family: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Four sequences of very different lengths, and torch's logits of each alone."""
    generator = np.random.default_rng(1)
    model = make_model(family)
    sequences = [generator.integers(3, 300, length) for length in LENGTHS]
    with torch.no_grad():
        return sequences, [model(input_ids=torch.from_numpy(s)[None]).logits[0].numpy() for s in sequences]


@pytest.fixture(scope="module")
def probe(family: str, exported: Callable[[str], Path]) -> LogitsProbe:
    folder = exported(family)
    decoder = load_manifest(folder).decoder
    assert decoder is not None
    return LogitsProbe(folder, decoder)


def padded(sequences: list[np.ndarray], side: str) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, sequences))
    ids, mask = np.full((len(sequences), width), 17, np.int64), np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, 1
    return ids, mask


def test_every_check_of_the_verification_passes(
    family: str, exported: Callable[[str], Path], checkpoint: Callable[[str], Path]
) -> None:
    task = {"folder": str(exported(family)), "checkpoint": str(checkpoint(family))}
    results = list(worker.run(task))
    assert all(isinstance(result, Check) and result.passed for result in results), results
    assert len(results) == 10
    assert max(r.difference for r in results if isinstance(r, Check) and r.name.endswith("logits")) <= FLOAT32


@pytest.mark.parametrize("chunks", [[90], [1] * 90, [30, 20, 39, 1]], ids=["prefill", "decode", "chunks"])
def test_one_sequence_agrees_with_torch_however_it_is_cut(
    probe: LogitsProbe, sequences_and_logits: tuple[list[np.ndarray], list[np.ndarray]], chunks: list[int]
) -> None:
    ids, wanted = sequences_and_logits[0][1], sequences_and_logits[1][1]
    probe.start(1)
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = probe.step(ids[None, start:end], np.ones((1, end), np.int64))
        np.testing.assert_allclose(found[0], wanted[end - 1], atol=FLOAT32)


@pytest.mark.parametrize("chunks", [[90], [30, 20, 39, 1]], ids=["whole", "chunks"])
def test_rows_padded_on_the_left_agree_with_torch_alone(
    probe: LogitsProbe, sequences_and_logits: tuple[list[np.ndarray], list[np.ndarray]], chunks: list[int]
) -> None:
    sequences, wanted = sequences_and_logits
    ids, mask = padded(sequences, "left")
    probe.start(len(sequences))
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = probe.step(ids[:, start:end], mask[:, :end])
        assert np.isfinite(found).all()  # also of rows that are all padding so far
    for row, rows in enumerate(wanted):
        np.testing.assert_allclose(found[row], rows[-1], atol=FLOAT32)


def test_rows_padded_on_the_right_agree_with_torch_alone_and_continue(
    probe: LogitsProbe, sequences_and_logits: tuple[list[np.ndarray], list[np.ndarray]]
) -> None:
    sequences, wanted = sequences_and_logits
    ids, mask = padded([sequence[:-1] if len(sequence) > 1 else sequence for sequence in sequences], "right")
    probe.start(len(sequences))
    found = probe.step(ids, mask)
    for row, rows in enumerate(wanted):
        np.testing.assert_allclose(found[row], rows[-2] if len(rows) > 1 else rows[-1], atol=FLOAT32)
    # The next column continues every row: for all but the shortest, after a gap of padding.
    mask = np.concatenate([mask, np.ones((len(sequences), 1), np.int64)], axis=1)
    found = probe.step(np.array([[sequence[-1]] for sequence in sequences]), mask)
    for row, rows in enumerate(wanted):
        if len(rows) > 1:
            np.testing.assert_allclose(found[row], rows[-1], atol=FLOAT32)


@pytest.fixture(scope="module")
def traced_gemma2() -> TracedDecoder:
    return trace(make_model("gemma2"))


def test_each_layer_leaves_one_marker_with_its_window_and_cap(traced_gemma2: TracedDecoder) -> None:
    nodes = marker_nodes(traced_gemma2.model.graph)
    assert [node.attributes["window"].as_int() for node in nodes] == [WINDOW, 0]
    assert all(node.attributes["softcap"].as_float() == 2.0 for node in nodes)


@pytest.mark.parametrize(
    ("name", "value"), [("window", ir.AttrInt64("window", 0)), ("softcap", ir.AttrFloat32("softcap", 0.0))]
)
def test_a_graph_without_its_window_or_cap_would_be_noticed(
    traced_gemma2: TracedDecoder, name: str, value: ir.Attr
) -> None:
    """The comparison with torch has teeth: losing either changes the logits far beyond the bound."""
    outputs = []
    for lose in (False, True):
        traced = replace(traced_gemma2, model=traced_gemma2.model.clone())
        for node in marker_nodes(traced.model.graph):
            if lose:
                node.attributes[name] = value
        lower(traced)
        outputs.append(run(traced.model, np.arange(3, 43)[None]))
    assert np.abs(outputs[0] - outputs[1]).max() > 10 * FLOAT32


def run(model: ir.Model, ids: np.ndarray) -> np.ndarray:
    """Logits of all positions, from an empty cache."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    (logits,) = session.run(["logits"], feeds)
    return logits
