"""transformers' `generation_config`, from the model's file or a request.

Supported settings become parameters; other settings that would affect tokens cause a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.manifest import Manifest, ModelFolder
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, Parameter, check_names
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULE_PARAMETER_NAMES, RULES
from topw_deploy.text import short_repr

CONFIG_FILE = "generation_config.json"
# Settings without effect on the drawn tokens.
_WITHOUT_EFFECT = frozenset({
    "transformers_version", "trust_remote_code", "top_w", "bos_token_id", "decoder_start_token_id",
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "compile_config", "disable_compile", "low_memory", "early_stopping", "length_penalty", "renormalize_logits",
})  # fmt: skip

# Values that disable a method.
_DISABLING_VALUES: dict[str, tuple[Any, ...]] = {
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
_PACKAGE_FOLDER = str(Path(__file__).parent)


def read_settings(stated: Mapping[str, Any], where: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Read the `known` settings under our names. Warns of other settings that would affect tokens.

    The parameters of sampling rules are used if `rule` names their rule; in a request also without `rule`, if they all
    belong to one rule.

    stated: the settings.
    where: the file or the parameter that has them, for messages.

    Raises ParameterError for an invalid or duplicate parameter.
    """
    honoured, ignored = {}, {}
    of_rule = _effective_rule_parameters(stated, implied=where != CONFIG_FILE)
    for key, value in stated.items():
        if value is None:
            continue
        if ALIASES.get(key, key) in known and (key in of_rule or key not in RULE_PARAMETER_NAMES):
            honoured[key] = value
        elif not has_no_effect(key, value):
            ignored[key] = value
    if ignored:
        listed = ", ".join(f"{key}={short_repr(value)}" for key, value in sorted(ignored.items()))
        warnings.warn(
            f"{where} sets {listed}, which has no effect here: name a `rule` to use its parameters.",
            stacklevel=_caller_stack_level(),
        )
    try:
        return {name: known[name].read(name, value) for name, value in check_names(honoured, known).items()}
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def _effective_rule_parameters(stated: Mapping[str, Any], *, implied: bool) -> frozenset[str]:
    """The names of the rule parameters that take effect in a generation config: those of the rule that it names.

    implied: whether parameters of a single rule choose that rule without naming it. False for the model's own file,
        whose rule is Top-W unless the file names another.
    """
    own = {name: value for name, value in stated.items() if name in RULE_PARAMETER_NAMES and value is not None}
    rule = own.get("rule")
    if rule is None and implied:
        found = {RULE_OF_VALUE[name].name for name, value in own.items() if not _disables(name, value)}
        rule = found.pop() if len(found) == 1 else None
    if rule is None:
        return frozenset()
    values = RULES[rule].values if isinstance(rule, str) and rule in RULES else ()
    return frozenset({"rule", *(value.name for value in values)})


def has_no_effect(name: str, value: Any) -> bool:
    """Whether a setting that is not supported has no effect on tokens anyway, such as num_beams=1."""
    return name in _WITHOUT_EFFECT or name.startswith("_") or value is False or _disables(name, value)


def _disables(key: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value in _DISABLING_VALUES.get(key, ())


def _caller_stack_level() -> int:
    """The stack level of the caller outside this package, for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        level, frame = level + 1, frame.f_back
    return level


def read_model_defaults(folder: ModelFolder[Manifest], tokenizer: Tokenizer) -> dict[str, Any]:
    """Read the parameters of the model's `generation_config.json`, without token ids outside the vocabulary.

    If the file has no EOS ids, those of `config.json` are read, else that of the tokenizer. Warns of settings without
    effect.

    Raises ParameterError, naming the file, for an invalid parameter.
    """
    known = {
        name: parameter for name, parameter in PARAMETERS.items() if "file" in parameter.places and parameter.per_prompt
    }
    defaults = read_settings(folder.read_json(CONFIG_FILE), CONFIG_FILE, known)
    if "eos_token_id" not in defaults:
        defaults["eos_token_id"] = _eos_from_other_files(folder, tokenizer)
    return _drop_unknown_ids(defaults, folder.manifest.sampler.vocab_size)


def _drop_unknown_ids(defaults: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    for name in ("eos_token_id", "stop_token_ids", "suppress_tokens"):
        defaults[name] = tuple(token for token in defaults.get(name, ()) if token < vocab_size)
    words = defaults.get("bad_words_ids", ())
    defaults["bad_words_ids"] = tuple(word for word in words if max(word) < vocab_size)
    return defaults


def read_bos_token_id(folder: ModelFolder[Manifest], tokenizer: Tokenizer) -> int | None:
    """The BOS id of the generation config, else of the model config, else of the tokenizer."""
    for config in (folder.read_json(CONFIG_FILE), *_model_configs(folder)):
        found = config.get("bos_token_id")
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return tokenizer.bos_token_id


def _eos_from_other_files(folder: ModelFolder[Manifest], tokenizer: Tokenizer) -> tuple[int, ...]:
    for config in _model_configs(folder):
        if config.get("eos_token_id") is not None:
            stated = {"eos_token_id": config["eos_token_id"]}
            return tuple(read_settings(stated, CONFIG_FILE, PARAMETERS)["eos_token_id"])
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _model_configs(folder: ModelFolder) -> list[dict[str, Any]]:
    config = folder.read_json("config.json")
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]
