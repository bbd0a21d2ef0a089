"""The torch sampler keeps the reference's tokens. `test_fuzz.py` compares tied, banned, greedy and extreme rows."""

import numpy as np
import pytest
import torch

from tests.support.rows import Scenario, embedding_table, random_case
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions, TopWParameters, crop
from topw_deploy.sampling import torch as module
from topw_deploy.sampling.torch import TensorGeometry, crop_rows

PEAKED = torch.tensor([[0.0, 5.0, 4.9, -1.0, 2.0]])
UNIFORM = TopWOptions(metric="uniform")
METRICS = ("mahalanobis", "unit", "cosine")


def table_of(kind, vocab=300, hidden=12):
    return embedding_table(Scenario(TopWOptions(), vocab, hidden, kind, 8))


def batch_of(cases):
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    names = cases[0].parameters
    return logits, {n: torch.tensor([case.parameters[n] for case in cases], dtype=torch.float64) for n in names}


def ids_of(result, row):
    return result.ids[row, : result.kept[row]].tolist()


def check_row(result, row, wanted):
    """Assert that the row's crop is the reference's, except at float64 ties (docs/contract/graph.md, section 4)."""
    ties, bounds = wanted.ties, FLOAT64_TIES
    if ties.objective <= bounds.objective or ties.nucleus <= bounds.nucleus:  # a cut pool does not count
        return
    assert ids_of(result, row) == wanted.kept.tolist()
    assert result.keep_mask[row].nonzero()[:, 0].tolist() == sorted(wanted.kept.tolist())
    if ties.certificate > bounds.objective:
        assert bool(result.certified[row]) == wanted.certified


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", [*METRICS, "uniform"])
def test_rows_of_any_type_keep_the_references_tokens_and_ties_go_to_the_lower_id(dtype, metric):
    rng = np.random.default_rng(5)
    for potential in ("nearest", "knn"):
        options = TopWOptions(metric=metric, potential=potential, top_m=90, alt_iters=9)
        table = table_of("near-duplicates", 1000)
        geometry = Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(table, metric)
        ours = None if metric == "uniform" else TensorGeometry.from_embeddings(torch.from_numpy(table), metric)
        cases = [random_case(rng, 1000) for _ in range(12)]
        logits, parameters = batch_of(cases)
        typed = logits.to(dtype)
        result = crop_rows(typed, parameters, options, ours)
        for row, case in enumerate(cases):
            check_row(
                result, row, crop(typed[row].float().numpy(), TopWParameters(**case.parameters), options, geometry)
            )
        assert result.masked(typed).dtype == dtype


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
            wanted = crop(row, parameters, UNIFORM)
            check_row(crop_rows(torch.from_numpy(row)[None], parameters, UNIFORM), 0, wanted)
            last += vocab - 1 in wanted.kept
    assert last > 3


@pytest.mark.slow
def test_a_rows_answer_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(9)
    options = TopWOptions(top_m=200)
    geometry = TensorGeometry.from_embeddings(torch.from_numpy(table_of("clusters", 1500, 8)), "mahalanobis")
    logits, parameters = batch_of([random_case(rng, 1500) for _ in range(60)])
    logits[7, 3], logits[20] = torch.nan, -torch.inf
    together = crop_rows(logits, parameters, options, geometry)
    assert together.invalid.nonzero()[:, 0].tolist() == [7, 20]
    for row in range(60):
        own = {name: column[row : row + 1] for name, column in parameters.items()}
        alone = crop_rows(logits[row : row + 1], own, options, geometry)
        assert ids_of(alone, 0) == ids_of(together, row)
        assert (alone.certified[0], alone.invalid[0]) == (together.certified[row], together.invalid[row])


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
    assert result.masked(logits).isneginf().sum(1).tolist() == [3, 5, 5, 5, 5, 5]


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


def test_the_row_test_spares_most_distances_of_unlikely_tokens(monkeypatch):
    rng, counts, computed = np.random.default_rng(4), [0, 0], TensorGeometry.point_distances
    geometry = TensorGeometry.from_embeddings(torch.from_numpy(table_of("clusters", 2000, 8)), "mahalanobis")
    logits = torch.from_numpy(-1.2 * np.log(rng.permutation(2000) + 1.0))[None]
    for run in range(2):

        def counted(self, x, y, run=run):
            counts[run] += len(x) * len(y)
            return computed(self, x, y)

        monkeypatch.setattr(TensorGeometry, "point_distances", counted)
        wide = {"lam": 0.6, "beta": 2.0, "init_top_p": 0.3, "geom_scale": 0.1}
        assert not crop_rows(logits, wide, TopWOptions(), geometry).certified
        monkeypatch.setattr(module._Pool, "_may_be_kept", lambda self, phi, best: torch.ones_like(phi).bool())
    assert 0 < counts[0] < counts[1] / 2


@pytest.mark.parametrize(
    ("logits", "parameters", "message"),
    [
        (torch.zeros(5), {}, r"logits are float32 \(5,\), but must be floating point \[B, V\]"),
        (torch.zeros(0, 5), {}, r"\(0, 5\)"),
        (torch.zeros(2, 5, dtype=torch.int64), {}, "logits are int64"),
        (PEAKED, {"lamm": 1.0}, "did you mean lam"),
        (PEAKED, {"lam": -1.0}, "lam is -1.0"),
        (PEAKED, {"lam": torch.ones(3)}, r"lam has shape \(3,\), but must be a number or \[1\]"),
    ],
)
def test_logits_and_parameters_that_cannot_be_right_are_refused(logits, parameters, message):
    with pytest.raises(ParameterError, match=message):
        crop_rows(logits, parameters, UNIFORM)


def test_a_missing_geometry_or_one_of_another_metric_is_refused():
    with pytest.raises(ParameterError, match="metric mahalanobis, but no geometry was given"):
        crop_rows(PEAKED, {})
    with pytest.raises(ParameterError, match="metric mahalanobis, but a cosine geometry"):
        crop_rows(PEAKED, {}, TopWOptions(), TensorGeometry.from_embeddings(torch.randn(5, 2), "cosine"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_kept_sets_are_the_same_and_certified_rows_sync_once():
    rng = np.random.default_rng(0)
    options = TopWOptions(top_m=200)
    table = torch.from_numpy(table_of("clusters", 20_000, 16))
    logits, parameters = batch_of([random_case(rng, 20_000) for _ in range(64)])
    here = crop_rows(logits, parameters, options, TensorGeometry.from_embeddings(table, "mahalanobis"))
    there = TensorGeometry.from_embeddings(table.cuda(), "mahalanobis")
    result = crop_rows(logits.cuda(), {n: c.cuda() for n, c in parameters.items()}, options, there)
    assert torch.equal(result.keep_mask.cpu(), here.keep_mask)
    peaked = logits.cuda() + 50 * torch.nn.functional.one_hot(torch.arange(64), 20_000).cuda()
    crop_rows(peaked, TopWParameters(), options, there)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing") as waits:
        crop_rows(peaked, TopWParameters(), options, there)
    torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["plain", "duplicates", "near-duplicates", "zeros"])
def test_the_distances_are_those_of_the_reference(metric, kind):
    table = table_of(kind)
    ids = np.arange(0, 300, 2)
    reference, ours = (
        Geometry.from_embeddings(table, metric),
        TensorGeometry.from_embeddings(torch.from_numpy(table), metric),
    )
    wanted = reference.distances(ids, np.arange(300))
    np.testing.assert_allclose(ours.distances(ids, np.arange(300)), wanted, rtol=1e-10, atol=1e-13)
    assert TensorGeometry.uniform().distances([4, 7], [4, 7]).tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("table", "metric", "message"),
    [
        (torch.ones(3, 2), "uniform", "metric .uniform. takes no embedding statistics"),
        (torch.ones(3), "cosine", r"float32 \(3,\) on cpu, but must be floating point \[V, d\]"),
        (torch.ones(3, 2, dtype=torch.int8), "cosine", "int8"),
        (torch.ones(3, 2, device="meta"), "cosine", "on meta"),
        (torch.tensor([[1.0, torch.nan]]), "unit", "NaN or infinity"),
    ],
)
def test_tables_that_cannot_be_measured_are_refused(table, metric, message):
    with pytest.raises(ParameterError, match=message):
        TensorGeometry.from_embeddings(table, metric)
