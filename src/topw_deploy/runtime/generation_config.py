"""Generation settings as transformers writes them: which of them can be met, and a warning that names the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import REQUEST_ALIASES, Parameter, show, under_our_names

# Keys that say nothing about which tokens come out of this runtime.
_SILENT = frozenset({
    "transformers_version", "trust_remote_code", "top_w", "bos_token_id", "decoder_start_token_id",
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "compile_config", "disable_compile", "low_memory", "early_stopping", "length_penalty", "renormalize_logits",
})  # fmt: skip

# Values that switch another method off, so that leaving it out changes nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "top_h": (0, 0.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "num_return_sequences": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1, 1.0),
}
_HERE = str(Path(__file__).parent)


def read_settings(stated: Mapping[str, Any], where: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """The settings among `stated` that are `known` here, checked and under our names; None counts as not stated.

    Gives one warning that names everything else that would choose other tokens.
    Raises ParameterError naming `where` when a value is out of range or a parameter is stated under two names.
    """
    honoured, ignored = {}, {}
    for key, value in stated.items():
        if value is None:
            continue
        if REQUEST_ALIASES.get(key, key) in known:
            honoured[key] = value
        elif not (key in _SILENT or key.startswith("_") or value is False or _is_off(key, value)):
            ignored[key] = value
    if ignored:
        listed = ", ".join(f"{key}={show(value)}" for key, value in sorted(ignored.items()))
        warnings.warn(
            f"{where} asks for {listed}, which has no effect here: Top-W alone chooses the tokens.",
            stacklevel=_callers_level(),
        )
    try:
        return {name: known[name].parse(name, value) for name, value in under_our_names(honoured).items()}
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def _is_off(key: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value in _OFF.get(key, ())


def _callers_level() -> int:
    """The stack level, for `warnings.warn` in the calling function, of the code that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level
