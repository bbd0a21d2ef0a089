"""The fields of a request as parameters of `Engine`.

Every parameter of `TopWModel.generate` can be given by its name, or by the name that OpenAI's API or vLLM has for it:
those of Top-W, of the other rules, penalties, limits and structured outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from topw_deploy.runtime.generation_config import has_no_effect
from topw_deploy.runtime.parameters import PARAMETERS, REQUEST_ALIASES, show, unknown_parameter, with_aliases
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.serve.failures import invalid

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
"""Fields of OpenAI's API that say nothing about the text. They are accepted and ignored."""

OF_REQUEST = frozenset({"num_return_sequences", "skip_special_tokens", "add_special_tokens"})
NAMES = frozenset({*PARAMETERS, *OF_REQUEST})
FIELDS = with_aliases(NAMES) | IGNORED
"""The undeclared fields that a request may have, unless its schema refuses them."""

LONGEST_NAME = 64
"""Characters of an unknown field's name that an answer repeats."""

MOST_ENTRIES = 1024
EACH_TOKEN = frozenset({"stop_strings", "bad_words", "bad_words_ids", "logit_bias", "suppress_tokens"})
"""Parameters whose entries delay the whole batch at every token; each may have at most MOST_ENTRIES."""

MOST_LOGPROBS = 20
LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})
"""Alternatives per token. OpenAI's API has the same limit."""

_SLOW = frozenset({"structured_outputs", "bad_words"})
_QUICK = 1000  # entries

_SAME = ("max_tokens", "max_completion_tokens")  # a client may send both


def check_fields(given: Iterable[str], known: Collection[str], refused: Mapping[str, str]) -> None:
    """Check the names of a request's fields.

    refused: names of other endpoints' fields -> the reason, and what to do.

    Raises RequestError naming the first one that is refused or not in `known`.
    """
    for name in given:
        if name in refused:
            raise invalid(f"{name} {refused[name]}.", name, "unsupported_parameter")
        if name not in known:
            raise invalid(_unknown(name, known), name[:LONGEST_NAME], "unknown_parameter")


def read_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's parameters in `fields`, under their own names. All names must have been checked.

    A field that is null counts as absent. A value that switches another rule off, such as `top_p` 1 or `top_k` -1,
    chooses no rule unless `rule` is given, because many clients always send it.

    Raises RequestError naming the field that is given twice, too long or has one value per prompt.
    """
    given = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    if all(name in given for name in _SAME) and given[_SAME[0]] == given[_SAME[1]]:
        del given[_SAME[0]]
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = REQUEST_ALIASES.get(name, name)
        if ours in found:
            raise invalid(f"{ours} is given twice, once as {name}; give it once.", name)
        if ours in PARAMETERS and PARAMETERS[ours].is_per_row(value):
            raise invalid(f"{name} is a list of values, but a request takes one value.", name)
        _check_size(name, ours, value)
        if "rule" in given or not _is_off(ours, value):
            found[ours] = value
    return found


def _is_off(name: str, value: Any) -> bool:
    return name in RULE_PARAMETER_NAMES and not isinstance(value, bool) and has_no_effect(name, value)


def _check_size(name: str, ours: str, value: Any) -> None:
    if ours in EACH_TOKEN and isinstance(value, (list, dict)) and len(value) > MOST_ENTRIES:
        raise invalid(f"{name} has {len(value)} entries, but may have at most {MOST_ENTRIES}; send fewer.", name)
    if ours in LOGPROBS and isinstance(value, int) and value > MOST_LOGPROBS:
        raise invalid(f"{name} is {show(value)}, but may be at most {MOST_LOGPROBS}.", name)


def takes_long(parameters: Mapping[str, Any]) -> bool:
    """Whether checking them is slow, and so must not happen in the loop's thread."""
    if not parameters.keys().isdisjoint(_SLOW):
        return True
    return any(isinstance(value, (list, dict)) and len(value) > _QUICK for value in parameters.values())


def _unknown(name: str, known: Iterable[str]) -> str:
    if len(name) > LONGEST_NAME:
        return f"unknown parameter {name[:LONGEST_NAME]!r}..., of {len(name)} characters; remove it."
    return str(unknown_parameter(name, known))


def named_as_given(param: str | None, fields: Mapping[str, Any]) -> str | None:
    """The name under which a request gave the parameter `param`; None if requests have no such parameter."""
    if param in fields:
        return param
    given = next((name for name in fields if REQUEST_ALIASES.get(name) == param), param)
    return given if param in NAMES or param == "tools" else None
