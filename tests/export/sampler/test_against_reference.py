"""The whole function against the reference, on a sample of `make fuzz`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.function_cases import (
    FORMS,
    Scenario,
    Tally,
    compare,
    embedding_table,
    feeds,
    graph,
    random_case,
    run,
)
from tests.support.samples import slow
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

SCENARIOS = [
    Scenario(TopWOptions(top_m=1200), 53, 8, "near-duplicates", 1),
    Scenario(TopWOptions(top_m=40, metric="unit", potential="knn"), 997, 16, "duplicates", 2),
    Scenario(TopWOptions(top_m=90, metric="cosine", alt_iters=9), 1000, 16, "clusters", 3),
    Scenario(TopWOptions(top_m=60, metric="uniform", alt_iters=1), 5000, 4, "plain", 4),
    Scenario(TopWOptions(top_m=7, metric="cosine", potential="knn", knn_k=2), 300, 5, "zeros", 5),
    Scenario(TopWOptions(top_m=1, metric="uniform"), 129, 4, "plain", 6),
    Scenario(TopWOptions(top_m=80, potential="knn", knn_k=100, alt_iters=2), 400, 12, "clusters", 7),
    Scenario(TopWOptions(top_m=60), 151_936, 4, "plain", 8),
]
ALWAYS = (53, 129, 300, 151_936)  # vocabularies; the others in CI


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.name, marks=() if each.vocab_size in ALWAYS else pytest.mark.long)
        for each in SCENARIOS
    ],
)
def test_every_form_equals_the_reference_in_kept_sets_tokens_and_certificates(scenario: Scenario) -> None:
    embeddings = embedding_table(scenario)
    metric = scenario.options.metric
    geometry = Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(embeddings, metric)
    sessions = {form: graph(scenario, form, embeddings, geometry) for form in FORMS}
    rng = np.random.default_rng(scenario.seed)
    tallies = {form: Tally() for form in FORMS}
    batches, batch = (2, 8) if scenario.vocab_size > 100_000 else (5, 48)
    for _ in range(batches):
        compare(scenario, sessions, geometry, [random_case(rng, scenario.vocab_size) for _ in range(batch)], tallies)
    for form, tally in tallies.items():
        assert tally.unexplained == [], form
        assert sum(tally.rows.values()) == 2 * batches * batch
        assert sum(tally.explained.values()) < 0.02 * 2 * batches * batch


@pytest.mark.parametrize("vocab", [1, slow(2), slow(127), slow(128), slow(129)])
def test_the_smallest_vocabularies_work(vocab: int) -> None:
    scenario = Scenario(TopWOptions(metric="mahalanobis"), vocab, 4, "plain", vocab)
    embeddings = embedding_table(scenario)
    geometry = Geometry.from_embeddings(embeddings, "mahalanobis")
    sessions = {form: graph(scenario, form, embeddings, geometry) for form in FORMS}
    rng = np.random.default_rng(0)
    tallies = {form: Tally() for form in FORMS}
    compare(scenario, sessions, geometry, [random_case(rng, vocab) for _ in range(16)], tallies)
    assert [tally.unexplained for tally in tallies.values()] == [[], []]


@pytest.mark.parametrize("form", ["branches", slow("no-branches")])
def test_no_crop_holds_a_banned_token_with_several_threads(form: str) -> None:
    """J of a prefix with banned tokens differs only in the last bit."""
    scenario = Scenario(TopWOptions(top_m=200, metric="cosine"), 600, 16, "plain", 1)
    embeddings = embedding_table(scenario)
    session = graph(scenario, form, embeddings, Geometry.from_embeddings(embeddings, "cosine"), threads=2)
    rng = np.random.default_rng(0)
    cases = [random_case(rng, scenario.vocab_size) for _ in range(64)]
    for case in cases:
        case.logits[rng.permutation(scenario.vocab_size)[8:]] = -np.inf
        case.parameters.update(lam=0.06, beta=1.5, temperature=0.9, selection_temperature=0.0, geom_scale=-1.0)
    inputs = feeds(cases)
    for _ in range(4):
        inputs["logits"] = np.roll(inputs["logits"], 1, axis=0)
        masks = run(session, inputs)["keep_mask"]
        assert not (masks & np.isinf(inputs["logits"])).any()
