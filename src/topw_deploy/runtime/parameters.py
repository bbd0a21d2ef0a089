"""The parameters of a request: their names, their checks, and lists of one value per row.

The names are those of transformers, of vLLM (penalties) and of Top-W. REQUEST_ALIASES has those of other libraries.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.plain_text import short_repr
from topw_deploy.runtime.callbacks import check_criteria, check_streamer
from topw_deploy.runtime.structured.constraint import read_constraint
from topw_deploy.sampling.beta import beta_coefficients
from topw_deploy.sampling.parameters import (
    ALIASES,
    IN_FLOAT32,
    OPTION_NAMES,
    PARAMETER_NAMES,
    check_range,
    unknown_name,
)
from topw_deploy.sampling.presets import check_geom_unit, check_preset
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULES, unknown_rule_error
from topw_deploy.sampling.seeds import SEED_BITS

OTHER_SAMPLERS = frozenset({"top_a", "tfs_z", "penalty_alpha", "mirostat"})
"""Parameters of samplers that are not among the rules."""

REQUEST_ALIASES: Mapping[str, str] = {
    **ALIASES,
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
    "n": "num_return_sequences",
    "response_format": "structured_outputs",
}
"""Names in vLLM, OpenAI's API and the authors' code -> ours."""

MOST_SEQUENCES = 1 << 16
"""The most sequences of a prompt: each takes memory before any of them runs."""


def is_boolean(value: Any) -> bool:
    """Whether `value` is a boolean of Python or numpy, which Python counts as an integer."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def _parse_integer(name: str, value: Any, low: int, high: float = math.inf) -> int:
    try:
        number = None if is_boolean(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number < high:
        bound = f">= {low}" if high == math.inf else f"in [{low}, {high})"
        raise ParameterError(f"{name} is {short_repr(value)}, but must be an integer {bound}.", name)
    return number


def _parse_real(name: str, value: Any, holds: Callable[[float], bool], bound: str) -> float:
    try:
        known = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        number = float(value) if known else math.nan
    except OverflowError:  # an integer beyond float64
        number = math.inf
    # The graph computes in float32.
    if not holds(number) or not holds(_to_float32(number)):
        wanted = f"{bound} {IN_FLOAT32}" if holds(number) else bound
        raise ParameterError(f"{name} is {short_repr(value)}, but must be {wanted}.", name)
    return number


def _to_float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _parse_flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(f"{name} is {short_repr(value)}, but must be True or False.", name)
    return bool(value)


def _integer_parser(low: int, high: float = math.inf) -> Callable[[str, Any], int]:
    return lambda name, value: _parse_integer(name, value, low, high)


def _parse_positive(name: str, value: Any) -> float:
    return _parse_real(name, value, lambda x: 0 < x < math.inf, "a finite number > 0")


def _parse_finite(name: str, value: Any) -> float:
    return _parse_real(name, value, math.isfinite, "a finite number")


def _parse_top_w(name: str, value: Any) -> float:
    number = _parse_real(name, value, math.isfinite, "a finite number")
    check_range(name, number)
    check_range(name, number, _to_float32(number))
    return number


def _parse_beta(name: str, value: Any) -> float | str:
    """Returns a number, or text without outer spaces if the value depends on the temperature."""
    if isinstance(value, str):
        constant, slope = beta_coefficients(value)
        if slope:
            return value.strip()
        value = constant
    return _parse_top_w(name, value)


def _parse_rule(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in RULES:
        raise unknown_rule_error(value)
    return value


def _parse_rule_value(name: str, value: Any) -> float:
    stated = next(each for each in RULE_OF_VALUE[name].values if each.name == name)
    return _parse_real(name, value, stated.accepts, stated.bound)


def _parse_ids(name: str, value: Any) -> tuple[int, ...]:
    values = value if _is_list(value) else [value]
    return tuple(_parse_integer(name, v, 0) for v in values)


def _parse_nonempty_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _parse_ids(name, value)
    if not ids:
        raise ParameterError(f"{name} is empty, but must have at least one token id.", name)
    return ids


def _parse_id_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value) or not all(_is_list(v) and len(v) for v in value):
        raise ParameterError(
            f"{name} is {short_repr(value)}, but must be a list of non-empty lists of token ids.", name
        )
    return tuple(_parse_ids(name, v) for v in value)


def _parse_strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not _is_list(values) or not all(isinstance(v, str) and v for v in values):
        raise ParameterError(f"{name} is {short_repr(value)}, but must be a non-empty string or a list of them.", name)
    return tuple(values)


def _parse_biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} is {short_repr(value)}, but must map token ids to numbers.", name)
    result: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token)  # JSON keys are strings
        try:
            key = _parse_integer(f"a token id of {name}", token, 0)
            if key in result:
                raise ParameterError(f"{name} names the token id {key} twice; give it one bias.")
            bound = "a number below infinity (-inf bans the token)"
            result[key] = _parse_real(f"{name}[{key}]", bias, lambda x: x < math.inf and x == x, bound)
        except ParameterError as error:
            raise ParameterError(str(error), name) from None
    return result


def _parse_config(name: str, value: Any) -> dict[str, Any]:
    """The settings of a mapping or of a GenerationConfig of transformers, of which only non-default values are read."""
    if not isinstance(value, Mapping):
        if not callable(getattr(value, "to_diff_dict", None)):
            raise ParameterError(
                f"{name} is {short_repr(value)}, but must be a mapping or transformers' GenerationConfig."
            )
        value = value.to_diff_dict()
    if not all(isinstance(key, str) for key in value):
        raise ParameterError(f"{name} has the keys {short_repr(list(value))}, but keys must be names of parameters.")
    return {key: stated for key, stated in value.items() if stated is not None}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A request parameter.

    parse: function from (name, value of one row) to the checked value.
    default: this package's default.
    depth: how deeply lists are nested in one row's value. A value with one more level has one value per row.
    """

    parse: Callable[[str, Any], Any]
    default: Any = None
    depth: int = 0

    def is_per_row(self, value: Any) -> bool:
        """Whether `value` lists one value per row."""
        for _ in range(self.depth):
            if not _is_list(value):
                return False
            inner = [v for v in value if _is_list(v) and len(v)]
            if not inner:
                return False
            value = inner[0]
        return _is_list(value)


PARAMETERS: Mapping[str, Parameter] = {
    "max_new_tokens": Parameter(_integer_parser(0), 256),
    "max_length": Parameter(_integer_parser(1)),
    "min_new_tokens": Parameter(_integer_parser(0), 0),
    "min_length": Parameter(_integer_parser(0), 0),
    "do_sample": Parameter(_parse_flag),
    "eos_token_id": Parameter(_parse_ids, (), depth=1),
    "pad_token_id": Parameter(_integer_parser(0)),
    "ignore_eos": Parameter(_parse_flag, False),
    "stop_token_ids": Parameter(_parse_ids, (), depth=1),
    "stop_strings": Parameter(_parse_strings, (), depth=1),
    "repetition_penalty": Parameter(_parse_positive, 1.0),
    "presence_penalty": Parameter(_parse_finite, 0.0),
    "frequency_penalty": Parameter(_parse_finite, 0.0),
    "logit_bias": Parameter(_parse_biases, {}),
    "suppress_tokens": Parameter(_parse_ids, (), depth=1),
    "allowed_token_ids": Parameter(_parse_nonempty_ids, (), depth=1),
    "bad_words_ids": Parameter(_parse_id_lists, (), depth=2),
    "bad_words": Parameter(_parse_strings, (), depth=1),
    "no_repeat_ngram_size": Parameter(_integer_parser(0), 0),
    "structured_outputs": Parameter(read_constraint),
    "logprobs": Parameter(_integer_parser(0)),
    "prompt_logprobs": Parameter(_integer_parser(0)),
    "seed": Parameter(_integer_parser(0, 2**SEED_BITS)),
    "preset": Parameter(lambda _name, value: check_preset(value)),
    **{name: Parameter(_parse_top_w) for name in PARAMETER_NAMES},
    "beta": Parameter(_parse_beta),
    "geom_unit": Parameter(lambda _name, value: check_geom_unit(value)),
    "rule": Parameter(_parse_rule),
    **{name: Parameter(_parse_rule_value) for name in RULE_OF_VALUE},
}
"""The parameters that may differ by row."""

REQUEST_PARAMETERS: Mapping[str, Parameter] = {
    "num_return_sequences": Parameter(_integer_parser(1, MOST_SEQUENCES + 1), 1),
    "skip_special_tokens": Parameter(_parse_flag, True),
    "add_special_tokens": Parameter(_parse_flag, True),
    "generation_config": Parameter(_parse_config, {}),
    "streamer": Parameter(check_streamer),
    "stopping_criteria": Parameter(check_criteria, ()),
}
"""The parameters of a whole request."""


def check_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of a call's parameters. Returns `given` under our names, without None values.

    Raises ParameterError for parameters of other samplers, parameters that the export fixed, unknown names and
    duplicates.
    """
    known = [*PARAMETERS, *REQUEST_PARAMETERS]
    for name in given:
        if REQUEST_ALIASES.get(name, name) not in known:
            raise unknown_parameter_error(name, known)
    return replace_aliases({name: value for name, value in given.items() if value is not None})


def unknown_parameter_error(name: str, known: Iterable[str]) -> ParameterError:
    """The error for a name that is not among the accepted names `known`."""
    if name in OTHER_SAMPLERS:
        return ParameterError(
            f"{name} belongs to a sampler that is not available; remove it, or choose one of the rules "
            f"{', '.join(RULES)}."
        )
    ours = REQUEST_ALIASES.get(name, name)
    if ours in OPTION_NAMES:
        return ParameterError(f"{ours} is built into the graph, so no request can change it; export the model again.")
    return unknown_name(name, known)


def with_aliases(names: Collection[str]) -> frozenset[str]:
    """Our `names`, and the aliases that requests may use for them."""
    return frozenset({*names, *(alias for alias, ours in REQUEST_ALIASES.items() if ours in names)})


def replace_aliases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by our names, and tensors by lists. Raises ParameterError for a parameter under two names."""
    used: dict[str, str] = {}
    for name in given:
        ours = REQUEST_ALIASES.get(name, name)
        if ours in used:
            raise ParameterError(f"{ours} is given twice, as {used[ours]} and as {name}; give it once.", ours)
        used[ours] = name
    return {ours: _tensor_to_list(given[name]) for ours, name in used.items()}


def _tensor_to_list(value: Any) -> Any:
    is_tensor = hasattr(value, "tolist") and not isinstance(value, (np.ndarray, np.generic))
    return value.tolist() if is_tensor else value


def row_values(name: str, value: Any, rows: int, of: str = "prompts") -> list[Any]:
    """Check the parameter `name`. Returns a value for each of `rows` rows; None where a list has None.

    of: what a row is, for messages.
    """
    parameter = PARAMETERS[name]
    if not parameter.is_per_row(value):
        return [parameter.parse(name, value)] * rows
    values: Sequence[Any] = list(value)
    if len(values) != rows:
        raise ParameterError(
            f"{name} has {len(values)} values for {rows} {of}; give one value for all or one for each.",
            name,
        )
    return [None if v is None else parameter.parse(name, v) for v in values]
