"""The fast crop matches the reference and reports its stage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.samples import examples, slow
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import (
    FLOAT64_TIES,
    Geometry,
    TopWOptions,
    TopWParameters,
    crop,
    fast_crop,
)
from topw_deploy.sampling.fast.candidates import BlockMaxima, gap, sort_in_pool_order

from .brute_force import Case, Points, random_cases

UNIFORM = TopWOptions(metric="uniform")
STAGES = {"greedy", "candidates", "pool", "geometry", "literal"}


def fast(case: Case, dtype=np.float64, bound=None):
    return fast_crop(case.logits.astype(dtype), case.parameters, case.options, case.geometry, bound)


def check(found, wanted):
    """Assert that the crops are equal, except at float64 ties other than equal logits. Returns whether it compared."""
    ties, bounds = wanted.ties, FLOAT64_TIES
    if ties.objective <= bounds.objective or ties.nucleus <= bounds.nucleus or ties.certificate <= bounds.objective:
        return False
    assert found.kept.tolist() == wanted.kept.tolist()
    assert found.certified == wanted.certified
    return True


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", [40, slow(41)])
def test_the_kept_set_is_the_definitions(seed, dtype):
    compared, stages = 0, set()
    for case in random_cases(seed, 700):
        found = fast(case, dtype)
        compared += check(found, case.crop())
        stages.add(found.stage)
    assert compared > 600
    assert stages == {"candidates", "pool", "geometry"}


def test_a_repulsive_row_is_answered_by_the_definition_itself():
    for case in random_cases(42, 150, geom_scale=-0.7):
        found, wanted = fast(case), case.crop()
        assert found.kept.tolist() == wanted.kept.tolist()
        assert (found.stage, found.certified, found.steps) == ("literal", False, wanted.steps)
        assert (found.distances, found.distances_avoided) == (wanted.distances, 0)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(
    logits=arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.one_of(
            st.integers(-6, 6).map(float), st.floats(-30, 30, width=32), st.just(-math.inf), st.just(-0.0)
        ),
    ),
    lam=st.sampled_from([0.0, 1e-30, 0.1, 1.0, 2.2, 50.0]),
    reward=st.sampled_from([-1.0, 0.0, 1e-6, 0.6, 3.0, 40.0]),
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0, 100.0]),
    share=st.sampled_from([1e-7, 0.25, 0.5, 0.9, 0.999, 1.0]),
    top_m=st.integers(1, 45),
    scale=st.sampled_from([0.0, 0.5, 1.0, -0.5]),
)
def test_tied_banned_and_extreme_rows_keep_the_definitions_set(logits, lam, reward, temperature, share, top_m, scale):
    parameters = TopWParameters(
        lam=lam, beta=max(0.0, lam + reward), temperature=temperature, init_top_p=share, geom_scale=scale
    )
    options = TopWOptions(metric="uniform", top_m=top_m)
    if not np.isfinite(logits).any():
        with pytest.raises(ParameterError, match="every logit is -inf"):
            fast_crop(logits, parameters, options)
        return
    check(fast_crop(logits, parameters, options), crop(logits, parameters, options))


@pytest.mark.parametrize("vocab", [4095, slow(4096), 4097, *map(slow, (12_345, 33_000, 151_936))])
def test_long_rows_are_searched_by_blocks_with_the_same_answer(vocab):
    rng = np.random.default_rng(vocab)
    rows = {
        "peaked": rng.standard_normal(vocab) * 2.2 + 9.0 * (rng.random(vocab) < 20 / vocab),
        "flat": rng.standard_normal(vocab),
        "tied": np.round(rng.standard_normal(vocab) * 2.0),
        "banned": np.where(rng.random(vocab) < 0.999, -np.inf, rng.standard_normal(vocab)),
        "ascending": np.linspace(-8.0, 8.0, vocab),
        "last block": np.where(np.arange(vocab) >= vocab - 5, 9.0, rng.standard_normal(vocab)),
    }
    for name, row in rows.items():
        logits = row.astype(np.float32)
        for temperature, lam in ((1.0, 2.2), (2.0, 2.2), (2.0, 0.05), (1.0, 0.0)):
            parameters = TopWParameters(temperature=temperature, lam=lam, init_top_p=0.9)
            wanted = crop(logits, parameters, UNIFORM)
            for given_as in (logits, logits.astype(np.float64), np.repeat(logits, 2)[::2]):
                assert fast_crop(given_as, parameters, UNIFORM).kept.tolist() == wanted.kept.tolist(), name


def test_half_precision_integers_and_lists_are_read_as_by_the_definition():
    row = np.array([1.0, 3.0, 2.9, -2.0])
    for given_as in (row.astype(np.float16), row.tolist(), np.array([1, 3, 2, -2]), row.astype(">f4")):
        wanted = crop(given_as, TopWParameters(), UNIFORM)
        assert fast_crop(given_as, TopWParameters(), UNIFORM).kept.tolist() == wanted.kept.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.5, 2.8])
@pytest.mark.parametrize("vocab", [5, 9000])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("error")
def test_invalid_logits_are_refused_with_the_references_message(wrong, vocab, beta, temperature, dtype):
    row = np.zeros(vocab, dtype)
    row[vocab - 2] = wrong
    if wrong == -math.inf:
        row[:] = wrong
    parameters = TopWParameters(beta=beta, temperature=temperature)
    with pytest.raises(ParameterError) as ours:
        fast_crop(row, parameters, UNIFORM)
    with pytest.raises(ParameterError) as theirs:
        crop(row, parameters, UNIFORM)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("logits", "options", "geometry"),
    [
        (np.zeros((2, 3)), UNIFORM, None),
        (np.zeros(0), UNIFORM, None),
        (np.zeros(3), TopWOptions(), None),
        (np.zeros(3), TopWOptions(metric="cosine"), Points([[0.0], [1.0], [2.0]])),
        ([0.0, 0.0, 5.0], TopWOptions(), Points([[0.0], [1.0]])),
        ([0.0, 0.0, 5.0], TopWOptions(top_m=1), Points([[0.0], [1.0]])),
    ],
)
def test_wrong_shapes_and_geometries_are_refused_with_the_references_message(logits, options, geometry):
    if geometry is not None and geometry.metric == options.metric:
        geometry = Geometry.from_embeddings(geometry.table, "mahalanobis")  # these features check ids
    for parameters in (TopWParameters(), TopWParameters(beta=1.0)):
        with pytest.raises(ParameterError) as ours:
            fast_crop(logits, parameters, options, geometry)
        with pytest.raises(ParameterError) as theirs:
            crop(logits, parameters, options, geometry)
        assert str(ours.value) == str(theirs.value)


def test_a_token_without_embedding_matters_only_inside_the_pool():
    geometry = Geometry.from_embeddings(np.eye(2), "mahalanobis")
    row, options = np.array([1.0, 5.0, -3.0]), TopWOptions(top_m=2)
    for parameters in (TopWParameters(), TopWParameters(beta=1.0), TopWParameters(temperature=0.0)):
        wanted = crop(row, parameters, options, geometry)
        assert fast_crop(row, parameters, options, geometry).kept.tolist() == wanted.kept.tolist()


def test_the_logits_are_not_changed():
    row = np.array([1.0, 2.0, -np.inf, 0.5], dtype=np.float32)
    row.flags.writeable = False
    fast_crop(row, TopWParameters(init_top_p=0.3, lam=0.1), UNIFORM)


# Each stage


@pytest.mark.parametrize(
    ("parameters", "stage", "candidates"),
    [
        ({"temperature": 0.0}, "greedy", 0),
        ({"temperature": 0.0, "geom_scale": -1.0}, "greedy", 0),
        ({"beta": 2.2}, "candidates", 0),  # one token for beta <= lam
        ({}, "candidates", 2),
        ({"lam": 0.0, "init_top_p": 1.0}, "pool", 5),  # no gap without lam
        ({"lam": 0.0, "init_top_p": 0.1}, "geometry", 5),
        ({"geom_scale": -1.0}, "literal", 5),
    ],
)
def test_each_stage_is_entered_by_the_rows_that_need_it(parameters, stage, candidates):
    row = np.array([0.0, 5.0, 4.9, -9.0, 1.0])
    found = fast_crop(row, TopWParameters(**parameters), UNIFORM)
    assert (found.stage, found.candidates) == (stage, candidates)
    assert found.kept.tolist() == crop(row, TopWParameters(**parameters), UNIFORM).kept.tolist()


def test_a_certified_row_of_a_language_models_shape_reads_a_handful_of_logits():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal(151_936) * 2.2).astype(np.float32)
    logits[rng.permutation(151_936)[:20]] = 7.7 + rng.exponential(2.0, 20)
    for temperature in (0.7, 1.0, 1.5, 2.0):
        found = fast_crop(logits, TopWParameters(temperature=temperature), UNIFORM)
        assert (found.stage, found.certified, found.distances) == ("candidates", True, 0)
        assert found.candidates <= 20


@pytest.mark.parametrize("vocab", [1, 7, 4096, 4097, 10_000])
def test_blocks_find_every_token_at_or_above_a_threshold(vocab):
    rng = np.random.default_rng(vocab)
    for dtype in (np.float32, np.float64):
        row = np.where(rng.random(vocab) < 0.2, -np.inf, np.round(rng.standard_normal(vocab) * 4) / 4).astype(dtype)
        row[0] = 0.0
        blocks = BlockMaxima(row)
        assert blocks.largest == row.max()
        for threshold in (-math.inf, -1e300, -1.0, 0.25, 0.3, float(row.max()), float(row.max()) + 0.1):
            expected = np.flatnonzero((row.astype(np.float64) >= threshold) & np.isfinite(row))
            assert blocks.ids_at_least(threshold).tolist() == expected.tolist()
            limited = blocks.few_ids_at_least(threshold, most_blocks=3)
            assert limited is None or limited.tolist() == expected.tolist()
        for count in (1, 3, vocab // 2, vocab, vocab + 5):
            held = set(blocks.ids_including_largest(max(1, count)).tolist())
            finite = np.flatnonzero(np.isfinite(row))
            assert set(sort_in_pool_order(row, finite)[:count].tolist()) <= held


def test_a_threshold_between_two_float32_numbers_lets_the_upper_one_pass_and_the_lower_one_not():
    low = np.float32(0.1)
    high = np.nextafter(low, np.float32(1))
    blocks = BlockMaxima(np.array([low, high, 1.0], np.float32))
    assert blocks.ids_at_least(float(low)).tolist() == [0, 1, 2]
    assert blocks.ids_at_least(float(high)).tolist() == [1, 2]
    assert {1, 2} <= set(blocks.ids_at_least((float(low) + float(high)) / 2).tolist())


def test_the_gap_at_the_defaults_is_what_the_theory_page_says():
    assert gap(2.2, 0.6, 151_936) == pytest.approx(3.53, abs=0.01)
    assert gap(0.0, 0.6, 10) == math.inf
