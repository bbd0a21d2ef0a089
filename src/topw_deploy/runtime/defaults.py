"""The model's own defaults: `generation_config.json`, read with the question which of its wishes can be met."""

from __future__ import annotations

import warnings
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.parameters import PARAMETERS, show
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.parameters import ALIASES

FILE = "generation_config.json"

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


def model_defaults(folder: ModelFolder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Parameters that `generation_config.json` states, with end-of-sequence ids from `config.json` or the tokenizer
    when it states none. Token ids beyond the model's logits are left out: they can never be drawn.
    Gives one warning that names everything in it that has no effect here.

    Raises ParameterError naming the file when a value is out of range.
    """
    stated = {name: value for name, value in folder.read_json(FILE).items() if value is not None}
    defaults, ignored = {}, {}
    for key, value in stated.items():
        name = ALIASES.get(key, key)
        if name in PARAMETERS and name not in ("seed", "ignore_eos"):
            defaults[name] = _checked(name, value)
        elif not (key in _SILENT or key.startswith("_") or value is False or value in _OFF.get(key, ())):
            ignored[key] = value
    if ignored:
        listed = ", ".join(f"{key}={show(value)}" for key, value in sorted(ignored.items()))
        warnings.warn(
            f"{FILE} asks for {listed}, which has no effect here: Top-W alone chooses the tokens.", stacklevel=4
        )
    if "eos_token_id" not in defaults:
        defaults["eos_token_id"] = _eos_elsewhere(folder, tokenizer)
    return _within(defaults, folder.manifest.sampler.vocab_size)


def _within(defaults: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    for name in ("eos_token_id", "suppress_tokens"):
        defaults[name] = tuple(token for token in defaults.get(name, ()) if token < vocab_size)
    words = defaults.get("bad_words_ids", ())
    defaults["bad_words_ids"] = tuple(word for word in words if max(word) < vocab_size)
    return defaults


def bos_token(folder: ModelFolder, tokenizer: Tokenizer) -> int | None:
    """The beginning-of-sequence id: the generation config's, the model config's, the tokenizer's, or None."""
    for config in (folder.read_json(FILE), *_configs(folder)):
        found = config.get("bos_token_id")
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return tokenizer.bos_token_id


def _checked(name: str, value: Any) -> Any:
    try:
        return PARAMETERS[name].parse(name, value)
    except ParameterError as error:
        raise ParameterError(f"{FILE}: {error}") from None


def _eos_elsewhere(folder: ModelFolder, tokenizer: Tokenizer) -> tuple[int, ...]:
    for config in _configs(folder):
        if config.get("eos_token_id") is not None:
            return tuple(_checked("eos_token_id", config["eos_token_id"]))
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _configs(folder: ModelFolder) -> list[dict[str, Any]]:
    """`config.json`, and the part of it that describes the language model of a composite one."""
    config = folder.read_json("config.json")
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]
