"""The generation check compares at least half of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import Toy, export
from topw_deploy.export.verification import decoder as generation
from topw_deploy.export.verification.decoder import TokenAgreement, compare_tokens, generation_checks
from topw_deploy.export.verification.sampler import graph_geometry
from topw_deploy.manifest import Check, DecoderManifest, NotCompared, load_decoder_manifest
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, sample_row, uniform_for

PROMPTS = [np.array([5]), np.array([5, 9, 7])]


class Fixed:
    """Logits depend only on the number of tokens."""

    name = "fixed"

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows  # [positions, vocab]

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return self.rows[: len(ids)]

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        return self.rows[np.cumsum(runs) - 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    return export(tmp_path_factory.mktemp("toy") / "out", toy)


@pytest.fixture(scope="module")
def manifest(folder: Path) -> DecoderManifest:
    return load_decoder_manifest(folder)


@pytest.fixture(scope="module")
def geometry(folder: Path, manifest: DecoderManifest) -> Geometry:
    return graph_geometry(folder, manifest.sampler.options, manifest.sampler.vocab_size)


def rows(vocab: int, near_ties: Sequence[int]) -> np.ndarray:
    """Logits [32, vocab] that draw token n in row n; in rows `near_ties` rounding may draw n + 1."""
    found = np.full((32, vocab), -20.0, np.float32)
    found[np.arange(32), np.arange(32)] = 20.0
    for position in near_ties:  # the draw changes at the middle of both tokens' mass
        uniform = uniform_for(generation.SEED, position + 1)
        found[position, position] = np.log(uniform / (1 - uniform))
        found[position, position + 1] = 0.0
    return found


def agreement(
    manifest: DecoderManifest, geometry: Geometry, near_ties: Sequence[int], change: dict[int, int]
) -> TokenAgreement:
    """Ten reference tokens after a one-token prompt; `change`: position -> token."""
    parameters = TopWParameters(**{**asdict(manifest.defaults), "lam": 0.0, "beta": 8.0, "geom_scale": 0.0})
    logits = rows(manifest.sampler.vocab_size, near_ties)
    tokens = [
        sample_row(
            logits[n], parameters, manifest.sampler.options, geometry, uniform_for(generation.SEED, n + 1)
        ).next_token
        for n in range(10)
    ]
    for place, token in change.items():
        tokens[place] = token
    return compare_tokens(tokens, 10, manifest, Fixed(logits), geometry, np.array([5]), parameters)


def test_every_token_is_compared_behind_the_same_text(manifest: DecoderManifest, geometry: Geometry) -> None:
    assert agreement(manifest, geometry, [], {}) == TokenAgreement(equal=10, near_ties=0, wrong=0)
    assert agreement(manifest, geometry, [], {3: 77}) == TokenAgreement(equal=9, near_ties=0, wrong=1)


def test_a_near_tie_does_not_end_the_comparison(manifest: DecoderManifest, geometry: Geometry) -> None:
    ties = [0, 1, 2]
    found = [agreement(manifest, geometry, ties, {0: other}) for other in (0, 1)]
    assert sorted(found, key=lambda each: each.equal)[0] == TokenAgreement(equal=9, near_ties=1, wrong=0)
    wrong = [agreement(manifest, geometry, ties, {0: other, 7: 99}) for other in (0, 1)]
    assert all(each.wrong == 1 for each in wrong)
    assert all(type(each.wrong) is int for each in (*found, *wrong))  # JSON rejects numpy's


def three_tokens(manifest: DecoderManifest, geometry: Geometry, apart: float, token: int) -> TokenAgreement:
    """`token` where the crop is 1, 2 and 0, with the weights 0.35, 0.35 and 0.3; `apart`: logit of 1 less that of 2.

    The uniform number is 0.44. It draws the second of the two equal tokens, with 0.09 to both ends of its interval.
    """
    parameters = TopWParameters(lam=0.0, beta=8.0, geom_scale=0.0, temperature=1.0)
    logits = np.full((3, manifest.sampler.vocab_size), -np.inf, np.float32)
    logits[2, :3] = np.log([0.3, 0.35, 0.35])
    logits[2, 1] += apart
    return compare_tokens([token], 1, manifest, Fixed(logits), geometry, np.array([5, 9, 7]), parameters)


def test_rounding_may_swap_equal_logits(manifest: DecoderManifest, geometry: Geometry) -> None:
    equal, near_tie, wrong = TokenAgreement(1, 0, 0), TokenAgreement(0, 1, 0), TokenAgreement(0, 0, 1)
    assert [three_tokens(manifest, geometry, 1e-6, token) for token in (0, 1, 2, 3)] == [wrong, near_tie, equal, wrong]
    assert [three_tokens(manifest, geometry, -1e-6, token) for token in (0, 1, 2)] == [wrong, equal, near_tie]
    # 1e-3 is more than the verification's bound allows two logits of this size to move: 2 * 1e-4 * 1.2.
    assert [three_tokens(manifest, geometry, 1e-3, token) for token in (0, 1, 2)] == [wrong, wrong, equal]


def test_rounding_may_swap_the_largest_logits(manifest: DecoderManifest, geometry: Geometry) -> None:
    logits = np.zeros((1, manifest.sampler.vocab_size), np.float32)
    logits[0, 3:6] = [4.0, 4.0 - 1e-6, 3.9]
    found = [
        compare_tokens([token], 1, manifest, Fixed(logits), geometry, np.array([5]), TopWParameters(temperature=0.0))
        for token in (3, 4, 5)
    ]
    assert found == [TokenAgreement(1, 0, 0), TokenAgreement(0, 1, 0), TokenAgreement(0, 0, 1)]


@pytest.mark.parametrize(("second", "expected"), [(1e-6, TokenAgreement(0, 1, 0)), (0.1, TokenAgreement(0, 0, 1))])
def test_rounding_may_change_a_crop_whose_objective_is_tied(
    manifest: DecoderManifest, geometry: Geometry, second: float, expected: TokenAgreement
) -> None:
    """Two tokens of weights 1 and w. J_1 = 0 and J_2 = lam w log w / (1 + w) + c log(1 + w) are equal for some c."""
    weight, lam = 0.5, 1.0
    c = -lam * weight * np.log(weight) / (1 + weight) / np.log1p(weight)
    parameters = TopWParameters(lam=lam, beta=lam + c - second, geom_scale=0.0, temperature=1.0)
    logits = np.full((8, manifest.sampler.vocab_size), -np.inf, np.float32)
    logits[7, :2] = [0.0, np.log(weight)]
    prompt = np.arange(8)  # of which the uniform number, 0.81, would draw the second token
    assert compare_tokens([1], 1, manifest, Fixed(logits), geometry, prompt, parameters) == expected


def test_a_token_that_was_not_generated_is_wrong(manifest: DecoderManifest, geometry: Geometry) -> None:
    parameters = TopWParameters()
    logits = rows(manifest.sampler.vocab_size, [])
    found = compare_tokens([0, 1], 10, manifest, Fixed(logits), geometry, np.array([5]), parameters)
    assert found == TokenAgreement(equal=2, near_ties=0, wrong=8)


@pytest.mark.long
def test_a_right_export_passes_and_a_wrong_runtime_fails(demo_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from topw_deploy.export.verification.reference import TorchReference
    from topw_deploy.tiny import TINY_MODEL

    manifest = load_decoder_manifest(demo_export)
    geometry = graph_geometry(demo_export, manifest.sampler.options, manifest.sampler.vocab_size)
    reference = TorchReference(TINY_MODEL, "float32", None, False)
    for result in generation_checks(demo_export, manifest, reference, geometry, PROMPTS):
        assert isinstance(result, Check)
        assert (result.passed, result.detail) == (True, "10 of 10 tokens")
    plain = reference.logits_by_runs
    monkeypatch.setattr(reference, "logits_by_runs", lambda ids, runs: np.roll(plain(ids, runs), 1, axis=1))
    assert not any(
        isinstance(result, Check) and result.passed
        for result in generation_checks(demo_export, manifest, reference, geometry, PROMPTS)
    )


def test_a_generation_of_near_ties_alone_is_not_compared(
    folder: Path, manifest: DecoderManifest, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def near_ties(_tokens: list[int], _wanted: int, *rest: object) -> TokenAgreement:
        asked.append(len(rest[3]))  # type: ignore[arg-type]
        return TokenAgreement(4, 6, 0)

    monkeypatch.setattr(generation, "compare_tokens", near_ties)
    results = list(generation_checks(folder, manifest, Fixed(np.zeros((1, 1))), geometry, PROMPTS))
    assert asked == [1, 3, 1, 3]
    assert all(isinstance(result, NotCompared) for result in results)
    assert "4 of 10 tokens are equal, fewer than half" in str(results[0])


def test_another_prompt_is_tried_after_one_of_near_ties(
    folder: Path, manifest: DecoderManifest, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([TokenAgreement(0, 10, 0), TokenAgreement(6, 4, 0), TokenAgreement(10, 0, 0)])
    monkeypatch.setattr(generation, "compare_tokens", lambda *_rest: next(answers))
    first, second = generation_checks(folder, manifest, Fixed(np.zeros((1, 1))), geometry, PROMPTS)
    assert isinstance(first, Check)
    assert (first.passed, first.detail) == (True, "6 of 10 tokens, 4 on a near-tie")
    assert isinstance(second, Check)
