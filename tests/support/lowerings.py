"""Lowers copies of a trace, runs them, and compares them with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from topw_deploy.export.sampler.attach import last_logits
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import Lowered, lower
from topw_deploy.export.verification.reference import CacheDriver, cache_driver
from topw_deploy.manifest import DecoderInfo

CONTEXT = 256
LOWERINGS = {
    "concat": {"kv": "concat", "target": "onnxruntime"},
    "group_query": {"kv": "static", "target": "onnxruntime"},
    "scatter": {"kv": "static", "target": "tensorrt", "max_length": 0},
}


def copy_of(traced: TracedDecoder) -> TracedDecoder:
    return replace(traced, model=traced.model.clone())


def lowered(traced: TracedDecoder, lowering: str) -> tuple[TracedDecoder, Lowered]:
    """A lowered copy of `traced`."""
    decoder = copy_of(traced)
    return decoder, lower(decoder, context_length=CONTEXT, **LOWERINGS[lowering])


def attention_nodes(decoder: TracedDecoder) -> list[ir.Node]:
    return [node for node in decoder.model.graph if node.op_type == "GroupQueryAttention"]


def driver_of(decoder: TracedDecoder, form: Lowered, kv_dtype: str = "float") -> CacheDriver:
    """Runs `decoder` for each row's last logits."""
    graph = decoder.model.graph
    last = last_logits(graph)
    last.name = "last"
    graph.outputs.append(last)
    info = DecoderInfo(
        model_type="tiny",
        kv_form=form.kv_form,
        num_layers=decoder.num_layers,
        states=form.states,
        kv_dtype=kv_dtype,
        context_length=CONTEXT,
        left_padding=True,
        ragged_chunks=form.ragged_chunks,
        most_columns=form.most_columns,
    )
    model = ir.to_proto(decoder.model).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # there is a worker for each core; idle threads of a session spin
    return cache_driver(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), info, "last")


@dataclass(frozen=True)
class Wanted:
    """What a decoder should compute.

    sequences: token ids.
    logits: torch's, [tokens, vocab] for each sequence.
    """

    sequences: Sequence[np.ndarray]
    logits: Sequence[np.ndarray]

    @property
    def largest(self) -> float:
        """The largest absolute logit, or 1."""
        return max(1.0, *(float(np.abs(rows).max()) for rows in self.logits))


def wanted_of(model: torch.nn.Module, lengths: Sequence[int], ids: int) -> Wanted:
    """What `model` computes of random sequences of these lengths. ids: the token ids are less."""
    generator = np.random.default_rng(1)
    sequences = [generator.integers(3, ids, length) for length in lengths]
    with torch.no_grad():
        found = [model(input_ids=torch.from_numpy(each)[None], use_cache=False).logits[0] for each in sequences]
    return Wanted(sequences, [rows.float().numpy() for rows in found])


def difference_alone(driver: CacheDriver, wanted: Wanted, chunks: Sequence[int]) -> float:
    """Largest difference in the logits after each chunk of the longest sequence."""
    ids, logits = max(zip(wanted.sequences, wanted.logits, strict=True), key=lambda pair: len(pair[0]))
    worst, end = 0.0, 0
    driver.start(1)
    for size in chunks:
        start, end = end, end + size
        found = driver.step(ids[None, start:end], np.ones((1, end), np.int64))
        worst = float(np.maximum(worst, np.abs(found[0] - logits[end - 1]).max()))  # NaN if one is
    return worst


def padded(sequences: Sequence[np.ndarray], side: str) -> tuple[np.ndarray, np.ndarray]:
    """A batch of the sequences and its mask."""
    width = max(map(len, sequences))
    ids, mask = np.full((len(sequences), width), 17, np.int64), np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, 1
    return ids, mask


def difference_in_a_batch(driver: CacheDriver, wanted: Wanted, side: str, chunks: Sequence[int]) -> float:
    """Largest difference in the logits of rows of different lengths, padded on one side."""
    ids, mask = padded(wanted.sequences, side)
    worst, end = 0.0, 0
    driver.start(len(ids))
    for size in chunks:
        start, end = end, end + size
        found = driver.step(ids[:, start:end], mask[:, :end])
        for row, logits in enumerate(wanted.logits):
            if mask[row, start:end].any():
                difference = np.abs(found[row] - logits[mask[row, :end].sum() - 1]).max()
                worst = float(np.maximum(worst, difference))
    return worst
