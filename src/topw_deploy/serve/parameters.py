"""The fields of a request as parameters of `Engine`.

A request can state every parameter of `TopWModel.generate` by its own name, or by its name in OpenAI's API or vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from topw_deploy.runtime.generation_config import has_no_effect
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, names_in_json, unknown_parameter_error
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.serve.failures import invalid_request
from topw_deploy.text import short_repr

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
"""Fields of OpenAI's API that say nothing about the text. They are accepted and ignored."""

FIELDS = names_in_json() | IGNORED
"""The undeclared fields that a request may have, unless its schema refuses them."""

LONGEST_NAME = 64
"""Number of characters of an unknown field's name that the answer repeats."""

MOST_ENTRIES = 1024
EACH_TOKEN = frozenset({"stop_strings", "bad_words", "bad_words_ids", "logit_bias", "suppress_tokens"})
"""Parameters of which each entry costs time at every token of the batch. Each may have at most MOST_ENTRIES."""

MOST_LOGPROBS = 20
"""Maximum number of alternatives per token, as in OpenAI's API."""

LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})

_SLOW = frozenset({"structured_outputs", "bad_words"})  # their checks compile grammars and tokenize
_MOST_QUICK = 1000  # a list with more entries is checked in a thread

_SYNONYMS = ("max_tokens", "max_completion_tokens")  # some clients send both


def check_fields(given: Iterable[str], known: Collection[str], refused: Mapping[str, str]) -> None:
    """Check the names of a request's fields.

    given: names of the fields in the request.
    known: names that the endpoint knows.
    refused: names of other endpoints' fields -> the reason, and what to do.

    Raises RequestError naming the first field that is refused or unknown.
    """
    for name in given:
        if name in refused:
            raise invalid_request(f"{name} {refused[name]}.", name, "unsupported_parameter")
        if name not in known:
            raise invalid_request(_unknown_field(name, known), name[:LONGEST_NAME], "unknown_parameter")


def read_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's parameters in `fields`, under the engine's names. The fields' names must have been checked.

    A field that is null counts as absent. A value that switches another rule off, such as `top_p` 1 or `top_k` -1,
    chooses no rule unless `rule` is given, because many clients always send such values.

    Raises RequestError naming a field that is given twice, is too long, or has one value per prompt.
    """
    given = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    if all(name in given for name in _SYNONYMS) and given[_SYNONYMS[0]] == given[_SYNONYMS[1]]:
        del given[_SYNONYMS[0]]
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours in found:
            raise invalid_request(f"{ours} is given twice, once as {name}; give it once.", name)
        if PARAMETERS[ours].lists_values(value):
            raise invalid_request(f"{name} is a list of values, but a request takes one value.", name)
        _check_size(name, ours, value)
        if "rule" in given or not _is_off(ours, value):
            found[ours] = value
    return found


def _is_off(name: str, value: Any) -> bool:
    return name in RULE_PARAMETER_NAMES and not isinstance(value, bool) and has_no_effect(name, value)


def _check_size(name: str, ours: str, value: Any) -> None:
    if ours in EACH_TOKEN and isinstance(value, (list, dict)) and len(value) > MOST_ENTRIES:
        raise invalid_request(
            f"{name} has {len(value)} entries, but may have at most {MOST_ENTRIES}; send fewer.", name
        )
    if ours in LOGPROBS and isinstance(value, int) and value > MOST_LOGPROBS:
        raise invalid_request(f"{name} is {short_repr(value)}, but may be at most {MOST_LOGPROBS}.", name)


def takes_long(parameters: Mapping[str, Any]) -> bool:
    """Whether checking `parameters` is so slow that it must not be done in the event loop's thread."""
    if not parameters.keys().isdisjoint(_SLOW):
        return True
    return any(isinstance(value, (list, dict)) and len(value) > _MOST_QUICK for value in parameters.values())


def _unknown_field(name: str, known: Iterable[str]) -> str:
    if len(name) > LONGEST_NAME:
        return f"unknown parameter {name[:LONGEST_NAME]!r}..., of {len(name)} characters; remove it."
    return str(unknown_parameter_error(name, known))


def name_as_given(param: str | None, fields: Mapping[str, Any]) -> str | None:
    """The name by which the request's `fields` state the parameter `param`; None if requests have no such parameter."""
    if param in fields:
        return param
    given = next((name for name in fields if ALIASES.get(name) == param), param)
    return given if param in FIELDS or param == "tools" else None
