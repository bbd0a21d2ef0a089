"""The known families, and detection of a model's family."""

from __future__ import annotations

from collections.abc import Collection

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import deepseek, gemma, harmony, hermes, llama, mistral, pythonic
from topw_deploy.runtime.tools.family import Family

FAMILIES = {
    module.FAMILY.name: module.FAMILY for module in (hermes, llama, mistral, gemma, pythonic, harmony, deepseek)
}

# The first family all of whose texts occur. Texts that must not occur begin with "!".
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("gemma", ("<start_function_call>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("hermes", ("<tool_call>", "!<arg_key>", "!<tool_sep>", "!<tool_calls>")),  # not GLM, Hunyuan, Apriel
    ("llama", ("<|python_tag|>",)),
    ("llama", ("<|start_header_id|>", '"parameters"', "ipython")),
)


def detect(template: str | None, tokens: Collection[str] = ()) -> str | None:
    """Returns the name of the family, or None for an unknown one.

    template: a chat template.
    tokens: the tokenizer's added tokens, which count if the template shows no calls.
    """
    for text in (template or "", "\n".join(tokens)):
        for family, signs in _SIGNS:
            if all((sign[1:] not in text) if sign.startswith("!") else (sign in text) for sign in signs):
                return family
    return None


def family_named(name: str) -> Family:
    """Raises ParameterError for an unknown name."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ParameterError(f"family is {name!r}, but must be one of {', '.join(FAMILIES)}.", "family")
    return FAMILIES[name]
