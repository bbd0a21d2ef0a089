"""Parts of the tail, evaluated by onnxscript."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.samples import slow
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.tail.answer import draw_member
from topw_deploy.export.tail.candidates import (
    CandidateLogits,
    block_candidates,
    certificate_bounds,
    draw_candidate,
    first_candidates,
    kept_candidates,
    largest_blocks,
    scan_candidates,
)
from topw_deploy.export.tail.function import sample
from topw_deploy.export.tail.geometry import (
    FARTHER,
    SetDistance,
    closeness,
    distance_to_set,
    features,
    recompute_nearest,
)
from topw_deploy.export.tail.inputs import (
    BLOCK,
    PARAMETERS,
    RowParameters,
    apply_edits,
    are_in_range,
    padded_width,
    row_parameters,
)
from topw_deploy.export.tail.ops import EagerOps
from topw_deploy.export.tail.pool import alternate, best_prefix, candidate_pool, is_certified, potential, prefix_ends
from topw_deploy.export.tail.spec import FORMS, TailSpec
from topw_deploy.runtime.inputs import RuleInputs
from topw_deploy.sampling import Geometry, crop, sample_row
from topw_deploy.sampling import apply_edits as reference_edits
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

OP = EagerOps(18)


def parameters_of(batch: int = 1, uniform: float = 0.5, **chosen: float) -> RowParameters:
    values = {"uniform": uniform} | {name: getattr(TopWParameters(**chosen), name) for name in PARAMETERS[:-1]}
    return row_parameters(OP, [np.full(batch, values[name], np.float32) for name in PARAMETERS])


def array(tensor: object) -> np.ndarray:
    return np.asarray(tensor.value if hasattr(tensor, "value") else tensor)


def table(rows_: int = 30, hidden: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows_, hidden)).astype(np.float32)


def test_edits_match_the_reference_and_padding_has_no_effect() -> None:
    logits = np.array([[2.0, -1.0, 0.0, 5.0, -3.0]], np.float32)
    ids = np.array([[3, -1, 1, 4]])
    penalty = np.array([[2.0, 9.0, 1.5, 1.0]], np.float32)
    bias = np.array([[0.0, 9.0, 0.25, -np.inf]], np.float32)
    edited = array(apply_edits(OP, logits, ids, penalty, bias, 5))
    assert edited.shape == (1, padded_width(5))
    assert np.array_equal(edited[0, :5], reference_edits(logits[0], ids[0], penalty[0], bias[0]))
    assert (edited[0, 5:] == -np.inf).all()


def test_an_id_outside_the_vocabulary_changes_no_token_of_any_row() -> None:
    logits = np.zeros((2, BLOCK - 1), np.float32)
    ids = np.array([[BLOCK - 1], [10**6]])
    ones = np.ones((2, 1), np.float32)
    edited = array(apply_edits(OP, logits, ids, ones, ones, BLOCK - 1))
    assert (edited[:, : BLOCK - 1] == 0).all()


def test_a_penalty_that_is_not_positive_makes_the_logit_nan() -> None:
    logits, ids = np.ones((1, 4), np.float32), np.array([[2, 3]])
    penalty, bias = np.array([[0.0, -1.0]], np.float32), np.zeros((1, 2), np.float32)
    edited = array(apply_edits(OP, logits, ids, penalty, bias, 4))[0, :4]
    assert np.isnan(edited).tolist() == [False, False, True, True]


@pytest.mark.parametrize("top_m", [7, 1200])
@pytest.mark.parametrize("vocab", [1, 50, 127, 128, 1009, 20_000])
def test_candidates_are_the_largest_logits_with_their_ids(vocab: int, top_m: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((2, vocab)).astype(np.float32)
    wide = np.pad(logits, ((0, 0), (0, padded_width(vocab) - vocab)), constant_values=-np.inf)
    every_candidate = block_candidates(OP, largest_blocks(OP, wide, padded_width(vocab)), vocab)
    found = first_candidates(OP, every_candidate, top_m)
    assert found.count == min(64, vocab, top_m)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : found.count]
    assert np.array_equal(array(found.ids)[:, : found.count], order)
    assert np.array_equal(array(found.logits)[:, : found.count], np.take_along_axis(logits, order, 1))
    assert (array(found.logits)[:, found.count :] == -np.inf).all()


def test_equal_logits_are_drawn_and_kept_in_the_order_of_their_ids() -> None:
    logits = np.array([[3.0, 1.0, 1.0, 1.0, 0.0] + [-np.inf] * 11], np.float32)
    shuffled = CandidateLogits(logits, np.array([[7, 9, 2, 5, 1, *range(20, 31)]]), 5)
    last = np.array([[2]])
    tokens = []
    for uniform in (0.0, 0.85, 0.95):
        tokens.append(
            int(array(draw_candidate(OP, shuffled, logits - 3, last, parameters_of(uniform=uniform)).token)[0, 0])
        )
    assert tokens == [7, 2, 5]
    assert np.flatnonzero(array(kept_candidates(OP, shuffled, last))).tolist() == [0, 2, 3]


def test_the_short_scan_finds_the_base_size_of_the_reference() -> None:
    logits = np.sort(np.random.default_rng(3).standard_normal((1, 40)).astype(np.float32) * 0.3)[:, ::-1]
    for lam, beta in ((2.2, 2.8), (0.3, 2.0), (1.0, 0.5), (0.0, 1.0)):
        scan = scan_candidates(OP, logits - logits[:, :1], 40, parameters_of(lam=lam, beta=beta))
        wanted = crop(logits[0], TopWParameters(lam=lam, beta=beta), TopWOptions(metric="uniform"))
        assert int(array(scan.last)[0, 0]) + 1 == wanted.base_size


@pytest.mark.slow
def test_no_row_is_certified_whose_base_size_exceeds_the_warm_start() -> None:
    spec = TailSpec(options=TopWOptions(metric="uniform"), vocab_size=300)
    rng = np.random.default_rng(0)
    given = 0
    for _ in range(40):
        logits = (rng.standard_normal((1, 300)) * rng.uniform(0.5, 3)).astype(np.float32)
        chosen = {"lam": 1.5, "beta": 2.0 + rng.uniform(), "init_top_p": float(np.float32(rng.uniform(0.1, 1)))}
        wide = np.pad(logits, ((0, 0), (0, padded_width(300) - 300)), constant_values=-np.inf)
        row = parameters_of(**chosen)
        candidates = block_candidates(OP, largest_blocks(OP, wide, padded_width(300)), 300)
        drop = array(candidates.logits) - logits.max()
        scan = scan_candidates(OP, drop, candidates.width, row)
        proof = certificate_bounds(OP, candidates, drop, scan, row, spec)
        if all(low <= float(array(column)[0, 0]) <= high for column, low, high in proof):
            given += 1
            assert crop(logits[0], TopWParameters(**chosen), spec.options).certified
    assert 5 < given < 40


def test_greedy_rows_have_reward_minus_one_and_scale_zero() -> None:
    row = parameters_of(temperature=0.0, geom_scale=-2.0)
    assert array(row.is_greedy).all()
    assert float(array(row.reward)[0, 0]) == -1
    assert float(array(row.geom_scale)[0, 0]) == 0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", -1.0),
        ("lam", np.inf),
        ("beta", np.nan),
        ("init_top_p", 0.0),
        ("init_top_p", 1.5),
        ("uniform", 1.0),
    ],
)
def test_a_parameter_outside_its_interval_is_detected(name: str, wrong: float) -> None:
    fine = {n: getattr(TopWParameters(), n) for n in PARAMETERS[:-1]} | {"uniform": 0.5}
    columns = [np.array([fine[n], wrong if n == name else fine[n]], np.float32) for n in PARAMETERS]
    assert array(are_in_range(OP, row_parameters(OP, columns))).all(axis=1).tolist() == [True, False]


@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
@pytest.mark.parametrize("neighbours", [0, 3])
def test_distances_to_a_set_match_the_reference(metric: str, neighbours: int) -> None:
    embeddings = table()
    embeddings[7], embeddings[8] = embeddings[3], embeddings[3] * np.float32(1.0001)
    geometry = Geometry.from_embeddings(embeddings, metric)
    distance = SetDistance(metric, neighbours, len(embeddings))
    mean, inverse_std = np.asarray(geometry.mean, np.float32), np.asarray(geometry.inverse_std, np.float32)
    x = features(OP, embeddings[None], mean, inverse_std, distance)
    near = recompute_nearest(OP, closeness(OP, x, x, distance), x, distance)
    for size in (1, 2, 12):
        members = np.zeros((1, len(embeddings)), bool)
        members[0, np.random.default_rng(size).permutation(len(embeddings))[:size]] = True
        found = array(distance_to_set(OP, near, members, distance))[0]
        all_distances = np.sort(geometry.distances(np.arange(len(embeddings)), np.flatnonzero(members[0])), axis=1)
        wanted = all_distances[:, : max(1, neighbours)].mean(axis=1)
        outside = ~members[0]
        assert np.abs(found - wanted)[outside].max() < 5e-6  # float32 roundings of features near 1
    assert np.finfo(np.float32).max > FARTHER


def test_near_duplicates_keep_their_digits_where_the_product_loses_them() -> None:
    embeddings = np.random.default_rng(0).standard_normal((20, 512)).astype(np.float32)
    embeddings[1] = embeddings[0] * np.float32(1.0) + np.float32(1e-4)
    distance = SetDistance("mahalanobis", 0, 20)
    x = features(OP, embeddings[None], np.zeros(512, np.float32), np.full(512, 22.6, np.float32), distance)
    rough = closeness(OP, x, x, distance)
    good = array(recompute_nearest(OP, rough, x, distance))[0, 0, 1]
    exact = np.square(array(x)[0, 0].astype(np.float64) - array(x)[0, 1]).sum()
    assert abs(good - exact) < 1e-5 * exact
    assert abs(array(rough)[0, 0, 1] - exact) > 1e-3 * exact


def test_one_iteration_of_the_alternation_matches_the_reference() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 25)).astype(np.float32)
    chosen = {"lam": 0.4, "beta": 2.0, "init_top_p": 0.3, "geom_scale": 0.5}
    row = parameters_of(3, **chosen)
    pool = candidate_pool(OP, logits, row, 25)
    ends = prefix_ends(OP, pool, row)
    options = TopWOptions(metric="uniform", alt_iters=1)
    sets = array(alternate(OP, pool, ends.warm, row, lambda op, members: np.float64(1.0).reshape(()), 1))
    for index in range(3):
        wanted = crop(logits[index], TopWParameters(**chosen), options)
        assert np.array_equal(np.sort(array(pool.ids)[index][sets[index]]), np.sort(wanted.kept))
        assert int(array(ends.warm)[index, 0]) + 1 == wanted.warm_size
        assert bool(array(is_certified(OP, ends, row))[index, 0]) == wanted.certified


def test_members_have_potential_zero_and_others_their_distance() -> None:
    members = np.array([[True, False, True]])
    f = potential(OP, members, np.array([[5.0, 2.0, 7.0]]), np.array([[0.5]], np.float32))
    assert array(f).tolist() == [[0.0, -1.0, 0.0]]


def test_tokens_with_minus_infinity_are_never_chosen() -> None:
    logits = np.array([[1.0, -np.inf, 0.9, -np.inf]], np.float32)
    row = parameters_of(lam=0.0, beta=1.0, geom_scale=-1.0, init_top_p=0.1)
    pool = candidate_pool(OP, logits, row, 4)
    kept = best_prefix(OP, pool, np.array([[0.0, 0.0, 9.0, 9.0]]), np.array([[1.0]]))
    assert array(kept).tolist() == [[True, True, False, False]]


def test_a_draw_from_members_uses_the_largest_kept_logit() -> None:
    logits = np.array([[100.0, 1.0, 0.5]], np.float32)
    row = parameters_of(temperature=0.1, uniform=0.0)
    pool = candidate_pool(OP, logits, row, 3)
    drawn = draw_member(OP, pool, np.array([[False, True, True]]), row)
    assert int(array(drawn.token)[0, 0]) == 1
    assert float(array(drawn.logprob)[0, 0]) == pytest.approx(-np.log1p(np.exp(-5.0)), abs=1e-6)
    assert int(array(drawn.kept)[0, 0]) == 2


@pytest.mark.parametrize("form", [form if form == FORMS[0] else slow(form) for form in FORMS])
def test_the_whole_sampler_matches_the_reference_operator_by_operator(form: str) -> None:
    embeddings = table(24, 5, seed=2)
    geometry = Geometry.from_embeddings(embeddings, "mahalanobis")
    options = TopWOptions(top_m=20)
    spec = TailSpec(options=options, vocab_size=24, embedding=plain_gather(24, 5), hidden_size=5, form=form)
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((4, 24)) * [[0.2], [3.0], [0.5], [1.0]]).astype(np.float32)
    logits[3, 0] = np.nan
    parameters = [TopWParameters(lam=0.4, beta=2.5, init_top_p=0.2, temperature=t) for t in (1.5, 1.0, 0.0, 1.0)]
    uniform = [0.1, 0.6, 0.9, 0.5]
    inputs = {
        "logits": logits,
        "edit_ids": np.zeros((4, 0), np.int64),
        "edit_penalty": np.zeros((4, 0), np.float32),
        "edit_bias": np.zeros((4, 0), np.float32),
        "allowed": np.zeros((4, 0), np.int32),
        "uniform": np.array(uniform, np.float32),
        **RuleInputs(4).arrays,
        "mean": np.asarray(geometry.mean, np.float32),
        "inverse_std": np.asarray(geometry.inverse_std, np.float32),
        "neighbour_bound": np.zeros(0, np.float32),
        "embedding_0": embeddings,
        **{n: np.array([getattr(p, n) for p in parameters], np.float32) for n in PARAMETERS[:-1]},
    }
    found = [array(value) for value in sample(OP, spec, inputs)]
    given = zip(logits, parameters, uniform, strict=True)
    wanted = [sample_row(row, chosen, options, geometry, u) for row, chosen, u in given]
    assert found[0].tolist() == [row.next_token for row in wanted]
    assert found[2].tolist() == [row.kept for row in wanted]
    assert found[3].tolist() == [row.certified for row in wanted]
    assert found[1] == pytest.approx([row.logprob for row in wanted], abs=1e-6)
    assert not wanted[0].certified
