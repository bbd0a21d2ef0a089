"""The known families of tool-call formats, and detection of a model's family."""

from __future__ import annotations

from collections.abc import Collection

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import deepseek, gemma, harmony, hermes, llama, mistral, pythonic
from topw_deploy.runtime.tools.family import Family

FAMILIES = {
    module.FAMILY.name: module.FAMILY for module in (hermes, llama, mistral, gemma, pythonic, harmony, deepseek)
}

# A family and the texts that must occur; texts that must not occur begin with "!". The first match counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("gemma", ("<start_function_call>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|tool_call_start|>",)),
    (
        "hermes",
        ("<tool_call>", "!<arg_key>", "!<tool_sep>", "!<tool_calls>"),
    ),  # the last three are of GLM, Hunyuan and Apriel
    ("llama", ("<|python_tag|>",)),
    ("llama", ("<|start_header_id|>", '"parameters"', "ipython")),
)


def detect(template: str | None, tokens: Collection[str] = ()) -> str | None:
    """Detect the family of a model. Returns its name, or None if it is unknown.

    template: a chat template.
    tokens: the tokenizer's added tokens, which count if the template shows no calls.
    """
    for text in (template or "", "\n".join(tokens)):
        for family, signs in _SIGNS:
            if all((sign[1:] not in text) if sign.startswith("!") else (sign in text) for sign in signs):
                return family
    return None


def get_family(name: str) -> Family:
    """Returns the family with this name. Raises ParameterError for an unknown name."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ParameterError(f"family is {name!r}, but must be one of {', '.join(FAMILIES)}.", "family")
    return FAMILIES[name]
