"""Compare the tokens that the runtime generates with those of the reference decoder and sampler.

The runtime samples with the file's function, not with the native operator, because the file is to be verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.export.verification.decoder_checks import BOUNDS
from topw_deploy.export.verification.reference import Reference
from topw_deploy.manifest import Check, DecoderManifest, ModelFolder, NotCompared
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.session import SessionOptions
from topw_deploy.sampling import Geometry, SampledRow, TopWParameters, sample_row, uniform_for

TOKENS = 10  # generated after each prompt
SEED = 7
# Name -> changes of the default parameters. The second is far from greedy, so that geometry decides.
_SETTINGS: tuple[tuple[str, dict[str, float]], ...] = (
    ("defaults", {}),
    ("lam 0.5, temperature 1.5", {"lam": 0.5, "temperature": 1.5}),
)
_NO_EDITS: dict[str, Any] = {
    "ignore_eos": True,
    "min_new_tokens": 0,
    "stop_strings": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "suppress_tokens": (),
    "bad_words_ids": (),
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True)
class TokenAgreement:
    """Counts of compared tokens. Each token is compared after the same earlier tokens.

    equal: tokens that the reference draws too.
    near_ties: other tokens, that rounding of the logits may draw, so that they prove nothing.
    wrong: other tokens that rounding cannot draw, and missing ones.
    """

    equal: int
    near_ties: int
    wrong: int

    @property
    def tokens(self) -> int:
        """The number of tokens in all."""
        return self.equal + self.near_ties + self.wrong

    @property
    def is_conclusive(self) -> bool:
        """Whether a token is wrong or at least half of the tokens are equal."""
        return self.wrong > 0 or 2 * self.equal >= self.tokens > 0


def generation_checks(
    folder: Path, manifest: DecoderManifest, reference: Reference, geometry: Geometry, prompts: Sequence[np.ndarray]
) -> Iterator[Check | NotCompared]:
    """Generate tokens after a prompt under each setting, and compare them with the reference's.

    prompts: token ids [n] each. The next one is tried if the comparison after one is not conclusive.
    """
    opened = ModelFolder(folder, DecoderManifest, unfinished=True)
    with TopWModel(opened, GraphSession(opened, SessionOptions(provider="cpu", sampler="graph")), 0.0) as model:
        for name, setting in _SETTINGS:
            parameters = TopWParameters(**{**asdict(manifest.defaults), **setting})
            yield _check_generation(f"generation ({name})", model, manifest, reference, geometry, prompts, parameters)


def _check_generation(
    name: str,
    model: TopWModel,
    manifest: DecoderManifest,
    reference: Reference,
    geometry: Geometry,
    prompts: Sequence[np.ndarray],
    parameters: TopWParameters,
) -> Check | NotCompared:
    best = TokenAgreement(0, 0, 0)
    prompts = [prompt for prompt in prompts if len(prompt) < manifest.decoder.context_length]
    for prompt in prompts:
        wanted = min(TOKENS, manifest.decoder.context_length - len(prompt))
        result = model.generate(prompt.tolist(), max_new_tokens=wanted, seed=SEED, **asdict(parameters), **_NO_EDITS)
        agreement = compare_tokens(result.token_ids, wanted, manifest, reference, geometry, prompt, parameters)
        if agreement.is_conclusive:
            ties = f", {agreement.near_ties} on a near-tie" if agreement.near_ties else ""
            detail = f"{agreement.equal} of {agreement.tokens} tokens{ties}"
            return Check(name, agreement.wrong == 0, float(agreement.wrong), 0.0, detail)
        best = max(best, agreement, key=lambda each: each.equal)
    reason = f"{best.equal} of {best.tokens} tokens are equal, fewer than half: the others are near-ties"
    return NotCompared(name, f"{reason}, on each of {len(prompts)} prompts")


def compare_tokens(
    tokens: list[int],
    wanted: int,
    manifest: DecoderManifest,
    reference: Reference,
    geometry: Geometry,
    prompt: np.ndarray,
    parameters: TopWParameters,
) -> TokenAgreement:
    """Compare generated tokens with the reference's draws after the same earlier tokens (teacher forcing).

    So a near-tie does not end the comparison.

    tokens: the generated ones.
    wanted: the number of tokens that should have been generated; missing ones are wrong.
    """
    error = BOUNDS[manifest.decoder.kv_dtype]
    sequence = np.concatenate([prompt, np.asarray(tokens, dtype=np.int64)])
    equal = near_ties = 0
    for count, token in enumerate(tokens):
        seen = sequence[: len(prompt) + count]
        logits = reference.logits_by_runs(seen, [len(prompt)] + [1] * count)[-1]
        uniform = uniform_for(SEED, len(seen))
        row = sample_row(logits, parameters, manifest.sampler.options, geometry, uniform)
        if row.next_token == token:
            equal += 1
        else:
            near_ties += _is_near_tie(row, token, logits, parameters, uniform, error)
    return TokenAgreement(equal, near_ties, max(wanted, len(tokens)) - equal - near_ties)


def _is_near_tie(
    row: SampledRow, token: int, logits: np.ndarray, parameters: TopWParameters, uniform: float, error: float
) -> bool:
    """Whether logits [V] with this relative error may draw `token` in place of the reference's `row`.

    Rounding may change the crop of a row on a tie. Then any token may be drawn whose weight is at least error^2 of the
    largest. Without this limit, any token would pass where one has nearly all mass, because the objective is then
    nearly tied with that of every longer prefix.
    """
    apart = 2 * error * max(1.0, float(np.abs(logits[row.kept_ids]).max()))  # logits that rounding may swap
    if parameters.greedy:
        return bool(logits[token] >= logits.max() - apart)
    changes_crop = min(row.ties.objective, row.ties.nucleus) <= error or row.ties.pool_cut
    if changes_crop and (logits[token] - logits.max()) / parameters.temperature >= 2 * np.log(error):
        return True
    return token in row.kept_ids and _may_be_drawn(row, token, logits, parameters.temperature, uniform, apart, error)


def _may_be_drawn(
    row: SampledRow, token: int, logits: np.ndarray, temperature: float, uniform: float, apart: float, error: float
) -> bool:
    """Whether rounded logits may draw `token` from the unchanged crop.

    The draw orders tokens by logit. Tokens whose logit is larger by more than `apart` certainly come before `token`;
    those within `apart` of it may come before or after. The ends of the token's interval in the cumulative mass are
    exact to `error` times the crop's mass.
    """
    kept = logits[row.kept_ids].astype(np.float64)
    mass = np.exp((kept - kept.max()) / temperature)
    place = uniform * mass.sum()
    start = mass[kept > logits[token] + apart].sum()
    end = mass[kept >= logits[token] - apart].sum()
    slack = error * mass.sum()
    return bool(start - slack <= place <= end + slack)
