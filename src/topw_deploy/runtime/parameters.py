"""The parameters of a generation: one table of their names, aliases, values, ranges and meanings.

`GenerationParameters` is the table. From it come the signatures of `generate` and `submit`, the checks, the options of
`topw generate`, the fields of the server's requests, and the table in docs/guide/runtime.md.

The names are those of transformers, of vLLM (penalties) and of Top-W.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, TypedDict, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.structured import read_constraint
from topw_deploy.sampling.parameters import ALIASES as AUTHORS_ALIASES
from topw_deploy.sampling.parameters import (
    GEOM_UNITS,
    OPTION_NAMES,
    PARAMETER_NAMES,
    PRESETS,
    RANGES,
    beta_coefficients,
    check_choice,
    is_boolean,
    read_number,
    unknown_name,
)
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULE_PARAMETER_NAMES, RULES, unknown_rule_error
from topw_deploy.sampling.seeds import SEED_BITS
from topw_deploy.text import short_repr

MOST_SEQUENCES = 1 << 16
"""The most sequences of a prompt: each takes memory before any of them runs."""

EVERYWHERE = frozenset({"json", "file", "command"})
NO_OPTION, REQUEST = EVERYWHERE - {"command"}, EVERYWHERE - {"file"}
JSON, PYTHON = frozenset({"json"}), frozenset[str]()

SPECULATIONS = ("prompt", "model", "off")
"""The values of `speculate`."""

T = TypeVar("T")
PerPrompt: TypeAlias = T | Sequence[T | None] | NDArray[Any]
"""One value for all prompts, or a list with one for each; None in the list means "not given"."""

Integer: TypeAlias = PerPrompt[int]
Number: TypeAlias = PerPrompt[float]
Flag: TypeAlias = PerPrompt[bool]
Ids: TypeAlias = int | Sequence[int]
Texts: TypeAlias = str | Sequence[str]
Read: TypeAlias = Callable[[str, Any], Any]
"""A function from a parameter's name and its value for one sequence to the checked value. Raises ParameterError."""


def read_nothing(name: str, value: Any) -> Any:
    """Return the value. The table replaces this by the check of choices, or of numbers of Top-W or a rule."""
    return value


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the table says of a parameter beside its type.

    text: the meaning, in one sentence.
    read: checks a value for one sequence. That of a number of Top-W or a rule comes from their tables.
    default: this package's default; None if there is none, or if it is the model's.
    places: where it may be stated beside calls in Python: "json" is any request in JSON, or a call's
        generation_config; "file" the model's `generation_config.json`; "command" an option of `topw generate`.
    choices: the texts that the value can be; empty if it is no such text.
    kind: int, float, bool or str, for a plain value; None for others. Comes from the type.
    per_prompt: whether the prompts of a call may have different values. Comes from the type.
    """

    text: str
    read: Read = read_nothing
    default: Any = None
    places: frozenset[str] = EVERYWHERE
    choices: tuple[str, ...] = ()
    kind: type | None = None
    per_prompt: bool = False

    @property
    def depth(self) -> int:
        """How deeply lists are nested in the value for one sequence."""
        return _DEPTHS.get(self.read, 0)

    def lists_values(self, value: Any) -> bool:
        """Whether `value` lists one value per prompt."""
        for _ in range(self.depth):
            if not _is_list(value):
                return False
            inner = [v for v in value if _is_list(v) and len(v)]
            if not inner:
                return False
            value = inner[0]
        return self.per_prompt and _is_list(value)


@dataclass(frozen=True, slots=True)
class Alias:
    """Another library's name of the parameter `name`."""

    name: str


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def integer(low: int, high: float = math.inf) -> Read:
    """A check for integers in [low, high)."""

    def read(name: str, value: Any) -> int:
        try:
            number = None if is_boolean(value) else operator.index(value)
        except TypeError:
            number = None
        if number is None or not low <= number < high:
            bound = f">= {low}" if high == math.inf else f"in [{low}, {high})"
            raise ParameterError(f"{name} is {short_repr(value)}, but must be an integer {bound}.", name)
        return number

    return read


def real(holds: Callable[[float], bool], bound: str) -> Read:
    """A check for numbers that are within `bound` in float32 too, in which the graph computes."""
    return lambda name, value: read_number(name, value, holds, bound)


_finite = real(math.isfinite, "a finite number")
_positive = real(lambda x: 0 < x < math.inf, "a finite number > 0")
_top_w = {name: real(holds, bound) for name, (holds, bound) in RANGES.items()}
_bias = real(lambda x: x < math.inf, "a number below infinity (-inf bans the token)")
_token = integer(0)


def _beta(name: str, value: Any) -> float | str:
    """Returns a number, or text without outer spaces if the value depends on the temperature."""
    if isinstance(value, str):
        constant, slope = beta_coefficients(value)
        if slope:
            return value.strip()
        value = constant
    return _top_w["beta"](name, value)


def _rule(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in RULES:
        raise unknown_rule_error(value)
    return value


def flag(name: str, value: Any) -> bool:
    """A check for booleans."""
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(f"{name} is {short_repr(value)}, but must be True or False.", name)
    return bool(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token(name, v) for v in (value if _is_list(value) else [value]))


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    if not (ids := _ids(name, value)):
        raise ParameterError(f"{name} is empty, but must have at least one token id.", name)
    return ids


def _id_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value) or not all(_is_list(v) and len(v) for v in value):
        raise ParameterError(
            f"{name} is {short_repr(value)}, but must be a list of non-empty lists of token ids.", name
        )
    return tuple(_ids(name, v) for v in value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not _is_list(values) or not all(isinstance(v, str) and v for v in values):
        shown = list(value) if isinstance(value, tuple) else value
        raise ParameterError(f"{name} is {short_repr(shown)}, but must be a non-empty string or a list of them.", name)
    return tuple(values)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} is {short_repr(value)}, but must map token ids to numbers.", name)
    result: dict[int, float] = {}
    for token, bias in value.items():
        is_text = isinstance(token, str) and token.isascii() and token.isdigit()  # JSON's keys
        key = _token(name, int(token) if is_text else token)
        if key in result:
            raise ParameterError(f"{name} names the token id {key} twice; give it one bias.", name)
        result[key] = _bias(name, bias)
    return result


def _settings(name: str, value: Any) -> dict[str, Any]:
    """The settings of a mapping or of a GenerationConfig of transformers, of which only non-default values are read."""
    stated = value.to_diff_dict() if callable(getattr(value, "to_diff_dict", None)) else value
    if not isinstance(stated, Mapping) or not all(isinstance(key, str) for key in stated):
        raise ParameterError(
            f"{name} is {short_repr(value)}, but must be a mapping of parameters by name, or transformers' "
            "GenerationConfig."
        )
    return {key: setting for key, setting in stated.items() if setting is not None}


def _streamer(name: str, value: Any) -> Any:
    methods = [getattr(value, "put", None), getattr(value, "end", None)]
    if isinstance(value, type) or not all(map(callable, methods)):
        raise ParameterError(
            f"{name} is {short_repr(value)}, but must be an object with methods put and end, like transformers' "
            "TextStreamer."
        )
    return value


def _criteria(name: str, value: Any) -> tuple[Callable[..., object], ...]:
    criteria = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for criterion in criteria:
        if isinstance(criterion, type) or not callable(criterion):
            raise ParameterError(
                f"{name} has {short_repr(criterion)}, but must be a function of the token ids, or a list of functions."
            )
    return criteria


_DEPTHS: Mapping[Read, int] = {_ids: 1, _some_ids: 1, _texts: 1, _id_lists: 2}
"""How deeply lists are nested in the value for one sequence; 0 for others. One more level lists a value per prompt."""


def takes_tensors(criterion: object) -> bool:
    """Whether a stopping criterion is one of transformers'."""
    return any(
        kind.__name__ == "StoppingCriteria" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(criterion).__mro__
    )


def criterion_name(criterion: object) -> str:
    """The name of a stopping criterion, for results and messages."""
    return str(getattr(criterion, "__name__", type(criterion).__name__))


class PromptInputs(TypedDict, total=False):
    """A prompt as keywords: `generate(**tokenizer(text))`."""

    input_ids: Any
    attention_mask: Any
    token_type_ids: Any


class GenerationParameters(PromptInputs, total=False):
    """The parameters of `TopWModel.generate` and of all that generates like it. None means "not given"."""

    max_new_tokens: Annotated[
        Integer, Parameter("Maximum number of new tokens; 0 only with prompt_logprobs.", integer(0), 256)
    ]
    max_length: Annotated[
        Integer, Parameter("Maximum number of tokens of prompt and answer together.", integer(1), None, NO_OPTION)
    ]
    min_new_tokens: Annotated[
        Integer, Parameter("Minimum number of new tokens before an end of sequence or a stop string.", integer(0), 0)
    ]
    min_length: Annotated[Integer, Parameter("The same minimum, counting the prompt too.", integer(0), 0, NO_OPTION)]
    seed: Annotated[
        Integer,
        Parameter(
            "Makes the draws repeatable; in [0, 2^64), random if not given.", integer(0, 2**SEED_BITS), None, REQUEST
        ),
    ]
    num_return_sequences: Annotated[
        int, Parameter("Number of independent sequences per prompt.", integer(1, MOST_SEQUENCES + 1), 1)
    ]
    do_sample: Annotated[Flag, Parameter("False means temperature 0.", flag, None, NO_OPTION)]
    preset: Annotated[
        PerPrompt[str],
        Parameter(
            "Named values for those of Top-W's six parameters that are not given.",
            places=REQUEST,
            choices=tuple(PRESETS),
        ),
    ]
    lam: Annotated[Number, Parameter("Weight of the entropy term, >= 0.")]
    beta: Annotated[
        PerPrompt[float | str],
        Parameter("Weight of the log-mass reward, >= 0; may depend on the temperature T, as 1.5+1.5*T.", _beta),
    ]
    temperature: Annotated[Number, Parameter("Sampling temperature, >= 0; below 1e-5, sampling is greedy.")]
    selection_temperature: Annotated[
        Number, Parameter("Temperature for choosing the kept set, >= 0; 0 means the temperature.")
    ]
    init_top_p: Annotated[Number, Parameter("Probability mass of the initial nucleus, in (0, 1].")]
    geom_scale: Annotated[Number, Parameter("Factor on token distances; a negative one repels.")]
    geom_unit: Annotated[
        PerPrompt[str],
        Parameter(
            "Unit of the geom_scale given with it: the metric's, or the median distance of likely tokens.",
            choices=GEOM_UNITS,
        ),
    ]
    rule: Annotated[
        PerPrompt[str],
        Parameter("Sampling rule; one of its parameters alone chooses it too.", _rule, choices=tuple(RULES)),
    ]
    top_k: Annotated[Integer, Parameter("keep the k best tokens, >= 1")]
    top_p: Annotated[Number, Parameter("keep the fewest best tokens with this probability in total, in (0, 1]")]
    min_p: Annotated[Number, Parameter("keep tokens with at least this share of the best one's probability, in [0, 1]")]
    top_h: Annotated[Number, Parameter("keep the best tokens up to this share of the pool's entropy, in (0, 1]")]
    top_h_pool: Annotated[Integer, Parameter("number of best tokens in the pool, >= 1")]
    typical_p: Annotated[Number, Parameter("keep the most typical tokens with this probability in total, in (0, 1)")]
    epsilon_cutoff: Annotated[Number, Parameter("keep tokens with at least this probability, in (0, 1)")]
    eta_cutoff: Annotated[Number, Parameter("like epsilon, with a lower cutoff for flat distributions, in (0, 1)")]
    top_n_sigma: Annotated[Number, Parameter("keep logits within so many standard deviations of the best one, >= 0")]
    min_k_tau: Annotated[Number, Parameter("keep at least this number divided by the range of the logits, >= 0")]
    repetition_penalty: Annotated[
        Number,
        Parameter(
            "Divides the logits > 0 of tokens in prompt and answer, and multiplies the others; > 0.", _positive, 1.0
        ),
    ]
    presence_penalty: Annotated[Number, Parameter("Subtracted once from the logits of generated tokens.", _finite, 0.0)]
    frequency_penalty: Annotated[
        Number, Parameter("Subtracted from the logits of generated tokens, per occurrence.", _finite, 0.0)
    ]
    no_repeat_ngram_size: Annotated[
        Integer, Parameter("No n-gram of this size occurs twice in prompt and answer; 0 allows it.", integer(0), 0)
    ]
    logit_bias: Annotated[
        PerPrompt[Mapping[Any, float]],
        Parameter("Numbers to add to tokens' logits after the penalties, by token id; -inf bans a token.", _biases, {}),
    ]
    suppress_tokens: Annotated[PerPrompt[Ids], Parameter("Token ids that are never drawn.", _ids, (), NO_OPTION)]
    allowed_token_ids: Annotated[
        PerPrompt[Ids],
        Parameter(
            "The only token ids that are drawn, with an end of sequence if there shall be one.", _some_ids, (), JSON
        ),
    ]
    bad_words_ids: Annotated[
        PerPrompt[Sequence[Sequence[int]]],
        Parameter(
            "Lists of token ids that are never completed, except a single end of sequence.", _id_lists, (), NO_OPTION
        ),
    ]
    bad_words: Annotated[
        PerPrompt[Texts],
        Parameter(
            "Texts that are never completed, as tokenized at the start of a text and after a space.", _texts, (), JSON
        ),
    ]
    stop_strings: Annotated[
        PerPrompt[Texts], Parameter("Texts before the first of which the answer is cut.", _texts, ())
    ]
    stop_token_ids: Annotated[
        PerPrompt[Ids], Parameter("Further token ids that end the answer, also with ignore_eos.", _ids, (), NO_OPTION)
    ]
    eos_token_id: Annotated[
        PerPrompt[Ids], Parameter("Token ids that end the answer, instead of the model's.", _ids, (), NO_OPTION)
    ]
    ignore_eos: Annotated[Flag, Parameter("Continue after the end of sequence.", flag, False, REQUEST)]
    pad_token_id: Annotated[
        Integer,
        Parameter(
            "Token id that the graph reads after a sequence's end; affects no result.", integer(0), None, NO_OPTION
        ),
    ]
    structured_outputs: Annotated[
        PerPrompt[Mapping[str, Any]],
        Parameter(
            "What the text must match: json, regex, choice, grammar or json_object.", read_constraint, None, JSON
        ),
    ]
    logprobs: Annotated[
        Integer,
        Parameter(
            "Log-probabilities of the drawn tokens, and of so many alternatives for each.", integer(0), None, REQUEST
        ),
    ]
    prompt_logprobs: Annotated[
        Integer,
        Parameter(
            "Log-probabilities of the prompt's tokens, and of so many alternatives for each.", integer(0), None, JSON
        ),
    ]
    speculate: Annotated[
        PerPrompt[str],
        Parameter(
            "Where to draft tokens from, of which a run accepts several: repetitions of prompt and answer, or the "
            "draft model; by default the draft model if there is one.",
            places=REQUEST,
            choices=SPECULATIONS,
        ),
    ]
    skip_special_tokens: Annotated[bool, Parameter("Omit special tokens from the text.", flag, True, NO_OPTION)]
    add_special_tokens: Annotated[
        bool, Parameter("Add the tokenizer's special tokens to a text prompt.", flag, True, NO_OPTION)
    ]
    generation_config: Annotated[
        Any, Parameter("A mapping of these parameters, or transformers' GenerationConfig.", _settings, {}, PYTHON)
    ]
    streamer: Annotated[Any, Parameter("Receives the prompt and each token.", _streamer, None, PYTHON)]
    stopping_criteria: Annotated[
        Any, Parameter("Functions of the token ids that end the answer.", _criteria, (), PYTHON)
    ]

    # Names in vLLM, OpenAI's API and the authors' code.
    max_tokens: Annotated[Integer, Alias("max_new_tokens")]
    max_completion_tokens: Annotated[Integer, Alias("max_new_tokens")]
    min_tokens: Annotated[Integer, Alias("min_new_tokens")]
    n: Annotated[int, Alias("num_return_sequences")]
    stop: Annotated[PerPrompt[Texts], Alias("stop_strings")]
    response_format: Annotated[PerPrompt[Mapping[str, Any]], Alias("structured_outputs")]
    lambda_geom: Annotated[Number, Alias("lam")]
    warm_p: Annotated[Number, Alias("init_top_p")]


def _read_table() -> tuple[dict[str, Parameter], dict[str, str]]:
    parameters: dict[str, Parameter] = {}
    aliases = dict(AUTHORS_ALIASES)
    values = {value.name: value for rule in RULES.values() for value in rule.values}
    for name, hint in get_type_hints(GenerationParameters, include_extras=True).items():
        stated = getattr(hint, "__metadata__", (None,))[0]
        if isinstance(stated, Alias):
            aliases[name] = stated.name
        if not isinstance(stated, Parameter):
            continue
        annotation = get_args(hint)[0]
        members = get_args(annotation)
        plain = next((kind for kind in members or (annotation,) if kind in (bool, int, float, str)), None)
        kind = None if stated.read in _DEPTHS else plain
        stated = replace(stated, kind=kind, per_prompt=NDArray[Any] in members)
        if name in values:
            value = values[name]
            usual = "" if value.default is None else f"; {value.default:g} if not given"
            text = f"{RULE_OF_VALUE[name].name}: {stated.text}{usual}."
            stated = replace(stated, text=text, read=real(value.accepts, value.bound))
        elif stated.read is read_nothing:
            stated = replace(
                stated, read=partial(check_choice, choices=stated.choices) if stated.choices else _top_w[name]
            )
        parameters[name] = stated
    return parameters, aliases


PARAMETERS: Mapping[str, Parameter]
ALIASES: Mapping[str, str]
PARAMETERS, ALIASES = _read_table()
"""The parameters by name, and names in vLLM, OpenAI's API and the authors' code -> ours."""


OF_KEPT_SET = ("preset", *PARAMETER_NAMES, "geom_unit", *RULE_PARAMETER_NAMES)
"""The parameters that choose the kept set of a step."""


def check_names(given: Mapping[str, Any], known: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Check the names of parameters. Returns `given` under our names, without None values, with lists for tensors.

    Raises ParameterError for parameters that the export fixed, unknown names and duplicates.
    """
    used: dict[str, str] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours not in known:
            raise unknown_parameter_error(name, known)
        if value is not None and (other := used.setdefault(ours, name)) != name:
            raise ParameterError(f"{ours} is given twice, as {other} and as {name}; give it once.", ours)
    values = {ours: given[name] for ours, name in used.items()}
    arrays = (np.ndarray, np.generic)
    return {n: v.tolist() if hasattr(v, "tolist") and not isinstance(v, arrays) else v for n, v in values.items()}


def read_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of parameters, and the value of each for one prompt. Returns the values under our names.

    Raises ParameterError.
    """
    return {name: PARAMETERS[name].read(name, value) for name, value in check_names(given).items()}


def values_per_prompt(name: str, value: Any, count: int, of: str = "prompts") -> list[Any]:
    """Check the parameter `name`. Returns a value for each of `count` prompts; None where a list has None.

    of: the noun for messages.
    """
    parameter = PARAMETERS[name]
    if not parameter.lists_values(value):
        return [parameter.read(name, value)] * count
    values: Sequence[Any] = list(value)
    if len(values) != count:
        raise ParameterError(
            f"{name} has {len(values)} values for {count} {of}; give one value for all or one for each.",
            name,
        )
    return [None if v is None else parameter.read(name, v) for v in values]


def unknown_parameter_error(name: str, known: Iterable[str]) -> ParameterError:
    """The error for a name that is not among the accepted names `known`."""
    ours = ALIASES.get(name, name)
    if ours in OPTION_NAMES:
        return ParameterError(f"{ours} is built into the graph, so no request can change it; export the model again.")
    return unknown_name(name, known)


def names_in_json() -> frozenset[str]:
    """The names, and the aliases, of the parameters that a request in JSON may state."""
    names = {name for name, parameter in PARAMETERS.items() if "json" in parameter.places}
    return frozenset({*names, *(alias for alias, ours in ALIASES.items() if ours in names)})
