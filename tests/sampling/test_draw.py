"""The draw takes the token whose interval contains u; u depends only on seed, position and sample."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import TopWOptions, TopWParameters, crop, draw, uniform_for
from topw_deploy.sampling.seeds import fresh_seed, prompt_seed, sequence_seed

RANDOM_MD = Path(__file__).parents[2] / "docs" / "contract" / "random.md"
LOGITS = np.log([0.1, 0.4, 0.2, 0.3])  # keep order: 1, 3, 2


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.44, 1), (0.45, 3), (0.77, 3), (0.78, 2), (1 - 2.0**-24, 2)],
)
def test_the_first_token_whose_cumulative_mass_exceeds_u_is_drawn(u, token):
    # Cuts at 0.4 / 0.9 = 0.4444 and 0.7 / 0.9 = 0.7778.
    drawn = draw(LOGITS, [1, 3, 2], 1.0, u)
    assert drawn.token == token
    assert drawn.logprob == pytest.approx(math.log(np.exp(LOGITS[token]) / 0.9))
    on_a_cut = draw(np.zeros(4), [0, 1, 2, 3], 1.0, 0.5)
    assert (on_a_cut.token, on_a_cut.margin) == (2, 0.0)


def test_the_sampling_temperature_weighs_the_kept_tokens_only():
    drawn = draw(np.array([100.0, 1.0, 0.0]), [1, 2], 0.5, 0.9)
    assert drawn.token == 2
    assert drawn.logprob == pytest.approx(-2 - math.log1p(math.exp(-2)))


@pytest.mark.slow
def test_frequencies_follow_the_renormalised_crop():
    logits = np.random.default_rng(0).normal(size=30)
    kept = crop(logits, TopWParameters(lam=0.3, beta=2.0), TopWOptions(metric="uniform")).kept
    probability = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
    tokens = [draw(logits, kept, 1.0, uniform_for(2026, position)).token for position in range(20_000)]
    counts = np.bincount(tokens, minlength=30)[kept]
    assert counts.sum() == 20_000
    chi_square = float((np.square(counts - 20_000 * probability) / (20_000 * probability)).sum())
    freedom = len(kept) - 1
    assert freedom > 5
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)  # standard deviation: sqrt(2 freedom)


@pytest.mark.parametrize(
    ("kept", "temperature", "uniform", "words"),
    [
        ([], 1.0, 0.5, "empty"),
        ([0], 0.0, 0.5, "temperature is 0.0"),
        ([0], 1.0, 1.0, "uniform is 1.0"),
        ([0], 1.0, math.nan, "uniform is nan"),
    ],
)
def test_a_draw_from_an_empty_crop_or_out_of_range_is_refused(kept, temperature, uniform, words):
    with pytest.raises(ParameterError, match=words):
        draw(np.zeros(3), kept, temperature, uniform)


# The uniform number


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """One block of Philox 4x64-10, written from Salmon et al. 2011."""
    mask = (1 << 64) - 1
    x, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [(high >> 64) ^ x[1] ^ k[0], high & mask, (low >> 64) ^ x[3] ^ k[1], low & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return x


def plain_word(seed: int, low: int, high: int) -> int:
    """The first word, written from docs/contract/random.md."""
    counter = low + (high << 64) + 1
    words = [(counter >> (64 * i)) & ((1 << 64) - 1) for i in range(4)]
    return philox_4x64_10(words, [seed, 0])[0]


words64 = st.integers(0, 2**64 - 1)


@settings(derandomize=True, max_examples=examples(300))
@given(words64, words64)
def test_draws_and_seeds_are_philox_4x64_10_written_in_plain_integers(seed, number):
    assert uniform_for(seed, number) == (plain_word(seed, number, 0) >> 40) / 2**24
    assert prompt_seed(seed, number) == plain_word(seed, number, 2**64 - 1) >> 11
    assert sequence_seed(seed, number) == (plain_word(seed, number, 2**64 - 2) >> 11 if number else seed)


def test_the_plain_philox_gives_the_published_block():
    # From Random123 (philox4x64-10, all-zero and all-one input).
    assert philox_4x64_10([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]  # fmt: skip
    ones = (1 << 64) - 1
    assert philox_4x64_10([ones] * 4, [ones] * 2) == [
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    ]  # fmt: skip


def test_the_published_vectors_are_the_ones_given():
    pattern = r"^\| (\d+) \| (\d+) \| (\d+) \| 0x([0-9a-f]{16}) \| (\d+) \| ([0-9.e-]+) \|$"
    rows = re.findall(pattern, RANDOM_MD.read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for seed, low, high, word, numerator, value in rows:
        assert plain_word(int(seed), int(low), int(high)) == int(word, 16)
        assert int(word, 16) >> 40 == int(numerator)
        assert int(numerator) / 2**24 == float(value)
        assert int(high) or uniform_for(int(seed), int(low)) == float(value)


def test_neighbouring_seeds_positions_and_sequences_are_unrelated():
    n = 4000
    streams = [
        [uniform_for(1, i) for i in range(n)],
        [uniform_for(2, i) for i in range(n)],
        [uniform_for(sequence_seed(1, 1), i) for i in range(n)],
        [uniform_for(i, 1) for i in range(n)],
    ]
    correlation = np.corrcoef([*streams, [*streams[0][1:], 0.5]])
    assert np.abs(correlation - np.eye(5)).max() < 5 / math.sqrt(n)
    for stream in streams:
        assert abs(np.mean(stream) - 0.5) < 5 * math.sqrt(1 / 12 / n)


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1), (2**64, 0), (0, 2**64)])
def test_numbers_outside_64_bits_are_refused(bad):
    with pytest.raises(ParameterError, match="must be in 0"):
        uniform_for(*bad)


def test_fresh_seeds_differ_and_survive_json_readers_with_doubles():
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(int(float(seed)) == seed for seed in seeds)


def test_the_seeds_of_a_files_prompts_are_those_of_the_page():
    page = RANDOM_MD.read_text(encoding="utf-8")
    section = page.split("## Derived seeds")[1].split("## ")[0]
    rows = [line.split("|")[1:5] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 4
    for seed, index, of_sequence, of_prompt in (map(int, row) for row in rows):
        assert (sequence_seed(seed, index), prompt_seed(seed, index)) == (of_sequence, of_prompt)
