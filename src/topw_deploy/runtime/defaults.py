"""The model's own defaults: `generation_config.json`, read with the question which of its wishes can be met."""

from __future__ import annotations

from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.generation_config import read_settings
from topw_deploy.runtime.parameters import PARAMETERS
from topw_deploy.runtime.tokenizer import Tokenizer

FILE = "generation_config.json"

_NOT_FROM_A_FILE = ("seed", "ignore_eos", "preset")


def model_defaults(folder: ModelFolder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Parameters that `generation_config.json` states, with end-of-sequence ids from `config.json` or the tokenizer
    when it states none. Token ids beyond the model's logits are left out: they can never be drawn.
    Gives one warning that names everything in it that has no effect here.

    Raises ParameterError naming the file when a value is out of range.
    """
    known = {name: parameter for name, parameter in PARAMETERS.items() if name not in _NOT_FROM_A_FILE}
    defaults = read_settings(folder.read_json(FILE), FILE, known)
    if "eos_token_id" not in defaults:
        defaults["eos_token_id"] = _eos_elsewhere(folder, tokenizer)
    return _within(defaults, folder.manifest.sampler.vocab_size)


def _within(defaults: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    for name in ("eos_token_id", "stop_token_ids", "suppress_tokens"):
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
