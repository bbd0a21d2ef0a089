"""Ten generated tokens: the runtime on the exported folder against a plain loop over the reference.

The function in the file samples, never the native operator: the file is what is verified and travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from topw_deploy.export.verification.decoder_checks import BOUNDS
from topw_deploy.export.verification.reference import Reference
from topw_deploy.manifest import Check, DecoderManifest
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.ort.session import GraphSession
from topw_deploy.runtime.session_options import SessionOptions
from topw_deploy.sampling import Geometry, TopWParameters, sample_row, uniform_for

TOKENS = 10
SEED = 7
# Under the second setting geometry has a say and the draw is not nearly greedy.
_SETTINGS: tuple[tuple[str, dict[str, float]], ...] = (
    ("defaults", {}),
    ("lam 0.5, temperature 1.5", {"lam": 0.5, "temperature": 1.5}),
)
_NO_EDITS = {
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


def generation_checks(
    folder: Path, manifest: DecoderManifest, reference: Reference, geometry: Geometry, prompt: np.ndarray
) -> Iterator[Check]:
    """Same prompt, same seed, token by token. Where the decoders' own rounding may turn a draw (their difference is
    bounded by the decoder checks), the comparison ends there and says so."""
    opened = ModelFolder(folder, DecoderManifest, unfinished=True)
    with TopWModel(opened, GraphSession(opened, SessionOptions(provider="cpu", sampler="graph")), 0.0) as model:
        for name, setting in _SETTINGS:
            parameters = TopWParameters(**{**asdict(manifest.defaults), **setting})
            result = model.generate(
                prompt.tolist(), max_new_tokens=TOKENS, seed=SEED, **asdict(parameters), **_NO_EDITS
            )
            agreed, detail = _compare(result.token_ids, manifest, reference, geometry, prompt, parameters)
            wanted = min(TOKENS, manifest.decoder.context_length - len(prompt)) if manifest.decoder else TOKENS
            missing = float(wanted - agreed) if not detail else 0.0
            yield Check(f"generation ({name})", missing == 0, missing, 0.0, f"{agreed} of {wanted} tokens{detail}")


def _compare(
    tokens: list[int],
    manifest: DecoderManifest,
    reference: Reference,
    geometry: Geometry,
    prompt: np.ndarray,
    parameters: TopWParameters,
) -> tuple[int, str]:
    """How many tokens agree, and why the comparison ended early where it may (else "")."""
    error = BOUNDS[manifest.decoder.kv_dtype]
    sequence = list(prompt)
    for count, token in enumerate(tokens):
        logits = reference.logits_by_runs(np.asarray(sequence, dtype=np.int64), [len(prompt)] + [1] * count)[-1]
        uniform = uniform_for(SEED, len(sequence))
        wanted = sample_row(logits, parameters, manifest.sampler.options, geometry, uniform)
        if wanted.next_token != token:
            close = min(wanted.draw_margin, wanted.ties.objective, wanted.ties.nucleus)
            if close <= error or wanted.ties.pool_cut:
                return count, f", then a draw within {close:.0e} of another"
            return count, ""
        sequence.append(token)
    return len(tokens), ""
