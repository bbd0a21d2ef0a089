"""Distances on tensors equal the reference's."""

import numpy as np
import pytest
import torch

from tests.support.tail_cases import Scenario, embedding_table
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, embedding_statistics
from topw_deploy.sampling.torch import TensorGeometry
from topw_deploy.sampling.torch import geometry as module

METRICS = ("mahalanobis", "unit", "cosine")


def table_of(kind, vocab=300, hidden=12):
    return embedding_table(Scenario(TopWOptions(), vocab, hidden, kind, 8))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_statistics_are_those_of_the_reference(metric, dtype, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_VALUES", 500)  # several blocks
    table = torch.from_numpy(table_of("zeros")).to(dtype)
    mean, inverse_std = embedding_statistics(table.float().numpy(), metric)
    ours = TensorGeometry.from_embeddings(table, metric)
    np.testing.assert_allclose(ours.mean.numpy(), mean, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(ours.inverse_std.numpy(), inverse_std, rtol=1e-12)
    assert ours.table.data_ptr() == table.data_ptr()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["plain", "duplicates", "near-duplicates", "zeros"])
def test_the_distances_are_those_of_the_reference(metric, kind):
    table = table_of(kind)
    ids = np.arange(0, 300, 2)
    reference, ours = (
        Geometry.from_embeddings(table, metric),
        TensorGeometry.from_embeddings(torch.from_numpy(table), metric),
    )
    rows, columns = ours.features(torch.from_numpy(ids)), ours.features(torch.arange(300))
    np.testing.assert_allclose(ours.point_distances(rows, columns).numpy(), reference.distances(ids, np.arange(300)),
                               rtol=1e-10, atol=1e-13)  # fmt: skip


def test_the_uniform_metric_needs_no_table():
    uniform = TensorGeometry.uniform()
    points = uniform.features(torch.tensor([4, 7]))
    assert uniform.point_distances(points, points).tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("table", "metric", "message"),
    [
        (torch.ones(3, 2), "uniform", "metric 'uniform' takes no embeddings"),
        (torch.ones(3), "cosine", r"float32 \(3,\) on cpu, but must be floating point \[V, d\]"),
        (torch.ones(3, 2, dtype=torch.int8), "cosine", "int8"),
        (torch.ones(3, 2, device="meta"), "cosine", "on meta"),
        (torch.tensor([[1.0, torch.nan]]), "unit", "NaN or infinity"),
    ],
)
def test_tables_that_cannot_be_measured_are_refused(table, metric, message):
    with pytest.raises(ParameterError, match=message):
        TensorGeometry.from_embeddings(table, metric)


def test_a_token_without_an_embedding_is_refused():
    geometry = TensorGeometry.from_embeddings(torch.randn(5, 2), "unit")
    with pytest.raises(ParameterError, match="token 5 has no embedding: the table has 5 rows"):
        geometry.features(torch.tensor([1, 5]))
