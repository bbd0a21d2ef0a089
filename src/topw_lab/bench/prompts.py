"""Make the prompts of decoding benchmarks, and check them against the model's context."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.errors import ManifestError, ParameterError
from topw_deploy.manifest import DecoderManifest, load_manifest


def decoder_manifest(folder: Path) -> DecoderManifest:
    """The manifest of an exported model. Raises ManifestError for a sampler without a decoder."""
    manifest = load_manifest(folder)
    if not isinstance(manifest, DecoderManifest):
        raise ManifestError(f"{folder} is a sampler without a decoder; use `topw bench sampler` for it.")
    return manifest


def random_prompt(folder: Path, prompt_tokens: int, new_tokens: int, seed: int) -> list[int]:
    """Random token ids for the model in `folder`, the same for equal seeds.

    Raises ManifestError for a sampler without a decoder, ParameterError if prompt and new tokens exceed the context.
    """
    manifest = decoder_manifest(folder)
    require_context(manifest, prompt_tokens, new_tokens, "prompt_tokens")
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, manifest.sampler.vocab_size, prompt_tokens)]


def require_context(manifest: DecoderManifest, prompt_tokens: int, new_tokens: int, name: str) -> None:
    """Raises ParameterError if the tokens exceed the context.

    name: the parameter that sets the prompt's length.
    """
    needed, context = prompt_tokens + new_tokens, manifest.decoder.context_length
    if needed > context:
        raise ParameterError(
            f"{prompt_tokens} + {new_tokens} tokens are {needed}, but the context has {context}; lower {name} or "
            "new_tokens.",
            name,
            "new_tokens",
        )
