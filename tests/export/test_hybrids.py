"""Every family with convolutions or recurrences agrees with torch in every lowering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.hybrid_models import HYBRIDS, make_hybrid
from tests.support.lowerings import LOWERINGS, copy_of, driver_of, lowered
from tests.support.samples import sampled
from tests.support.traces import trace
from topw_deploy.export.trace.placeholders import attention_placeholders
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.verification.reference import CacheDriver

pytestmark = pytest.mark.slow
SAMPLE = ("lfm2", "mamba2")
LONG = ("qwen3_5_text", "kimi_linear", "recurrent_gemma", "xlstm", "inkling2", "zaya")  # the others are broad

BOUND = 1e-4  # share of the largest logit, as in the export's verification
LENGTHS = (7, 70, 1, 40)  # one is longer than a call of standard operators may be


@cache
def wanted(family: str) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Token ids, and torch's logits [tokens, vocab] of each."""
    generator = np.random.default_rng(1)
    model = make_hybrid(family)
    sequences = [generator.integers(3, 300, length) for length in LENGTHS]
    with torch.no_grad():
        whole = [model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy() for ids in sequences]
    return sequences, whole


@cache
def traced(family: str) -> TracedDecoder:
    return trace(make_hybrid(family))


@pytest.fixture(scope="module", params=sampled(HYBRIDS, SAMPLE, LONG))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=LOWERINGS)
def lowering(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def driver(family: str, lowering: str) -> CacheDriver:
    return driver_of(*lowered(traced(family), lowering))


def assert_close(found: np.ndarray, expected: np.ndarray, all_logits: np.ndarray) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= BOUND * max(1.0, np.abs(all_logits).max())


@pytest.mark.parametrize("chunks", [[70], [1] * 20, [30, 20, 19, 1]], ids=["prefill", "decode", "chunks"])
def test_one_sequence_agrees_with_torch_for_all_chunks(driver: CacheDriver, family: str, chunks: list[int]) -> None:
    sequences, logits = wanted(family)
    driver.start(1)
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = driver.step(sequences[1][None, start:end], np.ones((1, end), np.int64))
        assert_close(found[0], logits[1][end - 1], logits[1])


@pytest.mark.parametrize("chunks", [[70], [30, 39, 1]], ids=["whole", "chunks"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_a_batch_agree_with_torch_alone(
    driver: CacheDriver, lowering: str, family: str, side: str, chunks: list[int]
) -> None:
    if (lowering, side) == ("concat", "right"):
        pytest.skip("rows of this form are padded on the left only")
    sequences, logits = wanted(family)
    width = max(LENGTHS)
    ids, mask = np.full((len(sequences), width), 17, np.int64), np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, 1
    driver.start(len(ids))
    end = 0
    for size in chunks:
        start, end = end, end + size
        found = driver.step(ids[:, start:end], mask[:, :end])
        for row, rows in enumerate(logits):
            if mask[row, start:end].any():
                assert_close(found[row], rows[mask[row, :end].sum() - 1], rows)


def test_states_are_listed_in_layer_order_and_are_inputs_and_outputs(family: str, lowering: str) -> None:
    decoder, form = lowered(traced(family), lowering)
    graph = decoder.model.graph
    inputs, outputs = ({value.name for value in values} for values in (graph.inputs, graph.outputs))
    layers = [state.layer for state in form.states]
    assert layers == sorted(layers)
    assert {state.kind for state in form.states} & {"convolution", "recurrent"}
    assert all(state.past in inputs and state.present in outputs for state in form.states)
    assert all(sum(value.name == state.past for value in graph.inputs) == 1 for state in form.states)


def test_one_node_reads_a_fixed_state_that_is_updated_in_place(family: str, lowering: str) -> None:
    """Past and present share memory, so a second reader of the past could read the present instead."""
    decoder, form = lowered(traced(family), lowering)
    if form.kv_form == "concat":
        pytest.skip("past and present of this form do not share memory")
    fixed = {state.past for state in form.states if not state.grows}
    readers = {value.name: len(value.uses()) for value in decoder.model.graph.inputs if value.name in fixed}
    assert readers == dict.fromkeys(fixed, 1)


@pytest.mark.long
@pytest.mark.parametrize("each", ["inkling", "inkling2"])
def test_losing_biases_by_distance_changes_logits_far_beyond_the_bound(each: str, lowering: str) -> None:
    changed = copy_of(traced(each))
    for node in attention_placeholders(changed.model.graph):
        node.replace_input_with(5, None)
    ids = wanted(each)[0][1][None, :40]
    found = []
    for decoder in (traced(each), changed):
        driver = driver_of(*lowered(decoder, lowering))
        driver.start(1)
        found.append(driver.step(ids, np.ones_like(ids)))
    assert np.abs(found[0] - found[1]).max() > 100 * BOUND
