"""The torch sampler keeps the reference's tokens."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch

from tests.support.tail_cases import Scenario, embedding_table, random_case
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions, TopWParameters, crop
from topw_deploy.sampling.torch import CropStage, TensorCrop, TensorGeometry, crop_rows

PEAKED = torch.tensor([[0.0, 5.0, 4.9, -1.0, 2.0]])
UNIFORM = TopWOptions(metric="uniform")


def both_geometries(scenario):
    if scenario.options.metric == "uniform":
        return Geometry.uniform(), None
    table = embedding_table(scenario)
    metric = scenario.options.metric
    return Geometry.from_embeddings(table, metric), TensorGeometry.from_embeddings(torch.from_numpy(table), metric)


def random_scenario(rng):
    options = TopWOptions(
        top_m=int(rng.choice([1, 3, 20, 64, 100, 400])),
        alt_iters=int(rng.choice([1, 2, 3, 9])),
        metric=str(rng.choice(["mahalanobis", "unit", "cosine", "uniform"])),
        potential=str(rng.choice(["nearest", "knn"])),
        knn_k=int(rng.choice([1, 2, 4])),
    )
    vocab = int(rng.choice([1, 5, 50, 300, 1000, 5000]))
    kind = str(rng.choice(["plain", "duplicates", "near-duplicates", "clusters", "zeros"]))
    return Scenario(options, vocab, int(rng.choice([4, 16])), kind, int(rng.integers(1 << 30)))


def batch_of(cases):
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    names = cases[0].parameters
    return logits, {n: torch.tensor([case.parameters[n] for case in cases], dtype=torch.float64) for n in names}


def ids_of(result, row):
    return result.ids[row, : result.kept[row]].tolist()


def check_row(result, row, wanted):
    """Assert that the row's crop is the reference's, except at float64 ties (docs/contract/graph.md, section 4)."""
    ties, bounds = wanted.ties, FLOAT64_TIES
    tied = ties.objective <= bounds.objective or ties.nucleus <= bounds.nucleus  # a cut pool does not count
    if not tied:
        assert ids_of(result, row) == wanted.kept.tolist()
        assert result.keep_mask[row].nonzero()[:, 0].tolist() == sorted(wanted.kept.tolist())
    if not tied and ties.certificate > bounds.objective:
        assert bool(result.certified[row]) == wanted.certified
    return tied


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_kept_sets_are_the_definitions_for_every_metric_potential_and_regime(seed):
    rng = np.random.default_rng(seed)
    stages, tied = Counter(), 0
    for _ in range(75):
        scenario = random_scenario(rng)
        geometry, on_tensors = both_geometries(scenario)
        cases = [random_case(rng, scenario.vocab_size) for _ in range(8)]
        logits, parameters = batch_of(cases)
        result = crop_rows(logits, parameters, scenario.options, on_tensors)
        for row, case in enumerate(cases):
            wanted = crop(case.logits, TopWParameters(**case.parameters), scenario.options, geometry)
            tied += check_row(result, row, wanted)
            stages[CropStage(int(result.stage[row]))] += 1
    assert min(stages[stage] for stage in CropStage if stage != CropStage.INVALID) > 5
    assert stages[CropStage.GEOMETRY] > 100
    assert tied < 15


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_cast_and_their_many_ties_go_to_the_lower_id(dtype):
    rng = np.random.default_rng(5)
    for _ in range(40):
        scenario = random_scenario(rng)
        geometry, on_tensors = both_geometries(scenario)
        cases = [random_case(rng, scenario.vocab_size) for _ in range(4)]
        logits, parameters = batch_of(cases)
        half = logits.to(dtype)
        result = crop_rows(half, parameters, scenario.options, on_tensors)
        for row, case in enumerate(cases):
            wanted = crop(half[row].float().numpy(), TopWParameters(**case.parameters), scenario.options, geometry)
            check_row(result, row, wanted)
        assert result.masked(half).dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [20_000, 32_001])
def test_a_large_vocabulary_is_searched_in_blocks_and_its_remainder_too(vocab):
    rng = np.random.default_rng(vocab)
    last = 0
    for kind in range(12):
        logits = -np.log(rng.permutation(vocab) + 1.0) * 1.5
        logits[-1 - kind % 3] = 0.1 * rng.standard_normal()
        logits = np.round(logits * 8) / 8 if kind % 2 else logits
        row = logits.astype(np.float32)
        for parameters in (TopWParameters(), TopWParameters(temperature=0.0), TopWParameters(lam=0.05, beta=0.6)):
            result = crop_rows(torch.from_numpy(row)[None], parameters, UNIFORM)
            wanted = crop(row, parameters, UNIFORM)
            check_row(result, 0, wanted)
            last += vocab - 1 in wanted.kept
    assert last > 3


@pytest.mark.slow
def test_a_rows_answer_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(9)
    scenario = Scenario(TopWOptions(top_m=200), 1500, 8, "clusters", 3)
    _, geometry = both_geometries(scenario)
    cases = [random_case(rng, 1500) for _ in range(60)]
    logits, parameters = batch_of(cases)
    logits[7, 3], logits[20] = torch.nan, -torch.inf
    together = crop_rows(logits, parameters, scenario.options, geometry)
    assert together.invalid.nonzero()[:, 0].tolist() == [7, 20]
    for row in range(60):
        own = {name: column[row : row + 1] for name, column in parameters.items()}
        alone = crop_rows(logits[row : row + 1], own, scenario.options, geometry)
        for field in fields(TensorCrop):
            if field.name not in ("ids", "vocab", "any_invalid"):
                assert getattr(alone, field.name)[0] == getattr(together, field.name)[row], (field.name, row)
        assert ids_of(alone, 0) == ids_of(together, row)


def test_numbers_and_columns_of_the_same_numbers_give_the_same_crops():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((5, 900)).astype(np.float32) * 2)
    shared = crop_rows(logits, TopWParameters(lam=0.3, beta=1.0, temperature=1.5), UNIFORM)
    named = crop_rows(logits, {"lambda_geom": torch.full((5,), 0.3, dtype=torch.float64), "beta": 1.0,
                               "temperature": 1.5}, UNIFORM)  # fmt: skip
    assert torch.equal(shared.keep_mask, named.keep_mask)
    assert shared.kept.min() > 1


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.0}, {"lam": 0.0}, {"geom_scale": -1.0}])
def test_a_vocabulary_of_one_token_keeps_it(parameters):
    result = crop_rows(torch.tensor([[-3.0], [2.0]]), parameters, TopWOptions(metric="uniform", top_m=1200))
    assert result.keep_mask.tolist() == [[True], [True]]
    assert result.kept.tolist() == [1, 1]


def test_invalid_rows_keep_nothing_and_are_flagged():
    logits = PEAKED.repeat(6, 1)
    logits[1, 2], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    lam = torch.tensor([2.2, 2.2, 2.2, 2.2, -1.0, torch.nan])
    result = crop_rows(logits, {"lam": lam}, UNIFORM)
    assert result.any_invalid
    assert result.invalid.tolist() == [False, True, True, True, True, True]
    assert result.kept.tolist() == [2, 0, 0, 0, 0, 0]
    assert result.keep_mask.sum(1).tolist() == [2, 0, 0, 0, 0, 0]
    assert result.certified.tolist() == [True, False, False, False, False, False]
    assert result.stage.tolist() == [CropStage.CANDIDATES] + [CropStage.INVALID] * 5
    assert result.masked(logits).isneginf().sum(1).tolist() == [3, 5, 5, 5, 5, 5]


def test_the_lowest_of_equal_largest_tokens_is_the_greedy_one_and_minus_zero_equals_zero():
    logits = torch.full((1, 20_000), -5.0)
    logits[0, [17, 9000, 19_999]] = torch.tensor([-0.0, 0.0, 0.0])
    assert ids_of(crop_rows(logits, {"temperature": 0.0}, UNIFORM), 0) == [17]
    assert ids_of(crop_rows(logits, {"beta": 1.0}, UNIFORM), 0) == [17]  # one token for beta <= lam
    assert ids_of(crop_rows(logits, {}, UNIFORM), 0) == [17, 9000, 19_999]


def test_equal_logits_across_the_pools_cut_are_taken_by_id():
    logits = torch.zeros(1, 10_000)
    result = crop_rows(logits, {"lam": 0.0, "init_top_p": 1.0}, TopWOptions(metric="uniform", top_m=70))
    assert ids_of(result, 0) == list(range(70))


def test_banned_tokens_are_never_kept_even_if_the_pool_is_larger():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [5, 250]] = 1.0
    result = crop_rows(logits, {"lam": 0.0, "beta": 9.0}, UNIFORM)
    assert result.keep_mask[0].nonzero()[:, 0].tolist() == [5, 250]


def test_the_masked_logits_are_the_kept_ones_and_minus_infinity():
    masked = crop_rows(PEAKED, {}, UNIFORM).masked(PEAKED)
    assert masked.tolist() == [[-torch.inf, 5.0, PEAKED[0, 2].item(), -torch.inf, -torch.inf]]


def test_certified_rows_sync_the_device_once_to_read_one_boolean():
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            if "_local_scalar_dense" in operator.name() or "nonzero" in operator.name() or "unique" in operator.name():
                waits.append((operator.name(), arguments[0].dtype, arguments[0].numel()))
            return operator(*arguments, **(named or {}))

    logits = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    geometry = TensorGeometry.from_embeddings(torch.randn(20_000, 4), "mahalanobis")
    with Watch():
        result = crop_rows(logits, TopWParameters(temperature=0.7), TopWOptions(), geometry)
        result.masked(logits)
    assert result.certified.all()
    assert waits == [("aten::_local_scalar_dense", torch.bool, 1)]


class Counting(Geometry):
    pairs = 0

    def point_distances(self, x, y):
        type(self).pairs += len(x) * len(y)
        return super().point_distances(x, y)


@pytest.mark.slow
def test_distances_and_those_avoided_add_up_to_the_literal_algorithms():
    rng = np.random.default_rng(4)
    scenario = Scenario(TopWOptions(top_m=150, alt_iters=9), 800, 8, "clusters", 1)
    geometry, on_tensors = both_geometries(scenario)
    counting = Counting(geometry.metric, geometry.table, geometry.mean, geometry.inverse_std)
    computed = literally = 0
    for _ in range(150):
        case = random_case(rng, 800)
        logits, parameters = batch_of([case])
        result = crop_rows(logits, parameters, scenario.options, on_tensors)
        Counting.pairs = 0
        crop(case.logits, TopWParameters(**case.parameters), scenario.options, counting)
        if result.stage[0] in (CropStage.POOL, CropStage.GEOMETRY, CropStage.LITERAL):
            assert int(result.distances + result.distances_avoided) == Counting.pairs
        if result.stage[0] == CropStage.GEOMETRY:
            computed, literally = computed + int(result.distances), literally + Counting.pairs
    assert 0 < computed < literally / 2


@pytest.mark.slow
def test_a_neighbour_bound_saves_distances_and_changes_nothing_else():
    rng = np.random.default_rng(6)
    scenario = Scenario(TopWOptions(top_m=150), 800, 16, "plain", 2)
    geometry, on_tensors = both_geometries(scenario)
    between = geometry.distances(np.arange(800), np.arange(800)) + np.where(np.eye(800) > 0, np.inf, 0.0)
    bound = torch.from_numpy(between.min(1) * (1 - 1e-6)).float()
    without = with_bound = 0
    for _ in range(100):
        logits, parameters = batch_of([random_case(rng, 800)])
        plain = crop_rows(logits, parameters, scenario.options, on_tensors)
        bounded = crop_rows(logits, parameters, scenario.options, on_tensors, bound)
        assert torch.equal(plain.keep_mask, bounded.keep_mask)
        if plain.stage[0] == CropStage.GEOMETRY:
            without, with_bound = without + int(plain.distances), with_bound + int(bounded.distances)
    assert with_bound < 0.6 * without


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(5), r"logits are float32 \(5,\), but must be floating point \[B, V\]"),
        (torch.zeros(0, 5), r"\(0, 5\)"),
        (torch.zeros(2, 5, dtype=torch.int64), "logits are int64"),
    ],
)
def test_other_shapes_and_types_are_refused(logits, message):
    with pytest.raises(ParameterError, match=message):
        crop_rows(logits, {}, UNIFORM)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"lamm": 1.0}, "did you mean lam"),
        ({"lam": -1.0}, "lam is -1.0"),
        ({"lam": torch.ones(3)}, r"lam has shape \(3,\), but must be a number or \[1\]"),
    ],
)
def test_parameters_that_cannot_be_right_are_refused(parameters, message):
    with pytest.raises(ParameterError, match=message):
        crop_rows(PEAKED, parameters, UNIFORM)


def test_a_missing_geometry_and_a_short_neighbour_bound_are_refused():
    with pytest.raises(ParameterError, match="metric mahalanobis, but no geometry was given"):
        crop_rows(PEAKED, {})
    with pytest.raises(ParameterError, match="metric mahalanobis, but a cosine geometry"):
        crop_rows(PEAKED, {}, TopWOptions(), TensorGeometry.from_embeddings(torch.randn(5, 2), "cosine"))
    with pytest.raises(ParameterError, match=r"neighbour bound has shape \(4,\), but must hold .* of the 5 tokens"):
        crop_rows(PEAKED, {}, UNIFORM, neighbour_bound=torch.zeros(4))
    with pytest.raises(ParameterError, match="neighbour bound is of type list, but must be a tensor"):
        crop_rows(PEAKED, {}, UNIFORM, neighbour_bound=[0.0] * 5)


def test_a_neighbour_bound_of_nan_is_refused_where_it_is_needed():
    geometry = TensorGeometry.from_embeddings(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), "cosine")
    wide = {"lam": 0.1, "beta": 2.0, "init_top_p": 0.1}
    with pytest.raises(ParameterError, match="the neighbour bound contains NaN"):
        crop_rows(PEAKED, wide, TopWOptions(metric="cosine"), geometry, torch.full((5,), torch.nan))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_kept_sets_are_the_same_and_certified_rows_sync_once():
    rng = np.random.default_rng(0)
    scenario = Scenario(TopWOptions(top_m=200), 20_000, 16, "clusters", 3)
    table = torch.from_numpy(embedding_table(scenario))
    cases = [random_case(rng, 20_000) for _ in range(64)]
    logits, parameters = batch_of(cases)
    here = crop_rows(logits, parameters, scenario.options, TensorGeometry.from_embeddings(table, "mahalanobis"))
    there = TensorGeometry.from_embeddings(table.cuda(), "mahalanobis")
    result = crop_rows(logits.cuda(), {n: c.cuda() for n, c in parameters.items()}, scenario.options, there)
    assert torch.equal(result.keep_mask.cpu(), here.keep_mask)
    peaked = logits.cuda() + 50 * torch.nn.functional.one_hot(torch.arange(64), 20_000).cuda()
    crop_rows(peaked, TopWParameters(), scenario.options, there)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing") as waits:
        crop_rows(peaked, TopWParameters(), scenario.options, there)
    torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
