"""A request made definite: for every row of the batch the value of every parameter.

A value comes from the request, else from the request's preset (the Top-W parameters), else from the model's
`generation_config.json`, else from the export (the Top-W parameters in the manifest) or this tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime.draws import fresh_seed
from topw_deploy.runtime.parameters import PARAMETERS, REQUEST_PARAMETERS, check_names, spread
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.presets import preset_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """Everything that one sequence is generated from.

    prompt: token ids, at least one. budget: most new tokens, from every limit together, >= 0.
    eos_token_ids: drawing one ends the row; empty when end of sequence is ignored. pad_token_id: fed after the end.
    min_new_tokens: end of sequence is banned and stop strings are not looked for before so many tokens.
    seed, sample: what the draws are made from.
    """

    prompt: tuple[int, ...]
    top_w: TopWParameters
    budget: int
    min_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    stop_strings: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    suppress_tokens: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    no_repeat_ngram_size: int
    seed: int
    sample: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model itself bounds, tokens in a sequence and token ids, and what it was opened for: `max_length` tokens
    in a sequence, `rows` sequences in a call, None for no such bound."""

    context_length: int
    vocab_size: int
    max_length: int | None = None
    rows: int | None = None

    @property
    def tokens(self) -> int:
        """Most tokens of a sequence."""
        return self.context_length if self.max_length is None else min(self.max_length, self.context_length)


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked parameters of the rows, and those of the request as a whole with their defaults filled in."""
    named = check_names(given)
    whole = {
        name: p.parse(name, named.pop(name)) if name in named else p.default for name, p in REQUEST_PARAMETERS.items()
    }
    return named, whole


def resolve(
    prompts: Sequence[Sequence[int]],
    given: Mapping[str, Any],
    model: Mapping[str, Any],
    exported: TopWParameters,
    limits: Limits,
    samples: int = 1,
    geometry: tuple[str, int | None] = ("uniform", None),
) -> list[RowRequest]:
    """One RowRequest per prompt and sample, the samples of a prompt side by side.

    given: the request's row parameters (see `split`), each one value for all prompts or a list of one per prompt.
    geometry: the model's metric and the width of its embeddings, which `preset` needs.
    Raises ParameterError for a bad value, PromptError for a prompt that is empty, too long or has unknown ids.
    """
    columns = {name: spread(name, value, len(prompts)) for name, value in given.items()}
    rows = []
    for index, prompt in enumerate(prompts):
        request = {name: column[index] for name, column in columns.items() if column[index] is not None}
        if "preset" in request:
            request = {**preset_parameters(request["preset"], *geometry), **request}
        _check_prompt(prompt, limits, f"prompt {index}" if len(prompts) > 1 else "the prompt")
        seed = request.get("seed")
        seed = fresh_seed() if seed is None else seed
        rows += [_row(tuple(prompt), request, model, exported, limits, seed, sample) for sample in range(samples)]
    return rows


def _row(
    prompt: tuple[int, ...],
    request: Mapping[str, Any],
    model: Mapping[str, Any],
    exported: TopWParameters,
    limits: Limits,
    seed: int,
    sample: int,
) -> RowRequest:
    def value(name: str) -> Any:
        return request.get(name, model.get(name, PARAMETERS[name].default))

    eos = frozenset(value("eos_token_id"))
    _check_ids("eos_token_id", eos, limits)
    for name in ("logit_bias", "suppress_tokens"):
        _check_ids(name, value(name), limits)
    for word in value("bad_words_ids"):
        _check_ids("bad_words_ids", word, limits)
    pad = value("pad_token_id")
    return RowRequest(
        prompt=prompt,
        top_w=_top_w(request, model, exported),
        budget=_budget(len(prompt), request, model, limits),
        min_new_tokens=max(value("min_new_tokens"), value("min_length") - len(prompt)),
        eos_token_ids=frozenset() if value("ignore_eos") else eos,
        pad_token_id=pad if pad is not None and pad < limits.vocab_size else min(eos, default=0),
        stop_strings=value("stop_strings"),
        seed=seed,
        sample=sample,
        **{
            name: value(name)
            for name in (
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "suppress_tokens",
                "bad_words_ids",
                "no_repeat_ngram_size",
            )
        },
    )


def _top_w(request: Mapping[str, Any], model: Mapping[str, Any], exported: TopWParameters) -> TopWParameters:
    values = {name: request.get(name, model.get(name, getattr(exported, name))) for name in PARAMETER_NAMES}
    if "do_sample" in request:
        if not request["do_sample"]:
            values["temperature"] = 0.0
        elif TopWParameters(**values).greedy and "temperature" in request:
            raise ParameterError(
                f"do_sample is True, but temperature is {request['temperature']!r}, which is greedy; give a higher one."
            )
        elif TopWParameters(**values).greedy:
            values["temperature"] = 1.0
    elif "temperature" not in request and model.get("do_sample") is False:
        values["temperature"] = 0.0
    return TopWParameters(**values)


def _budget(prompt: int, request: Mapping[str, Any], model: Mapping[str, Any], limits: Limits) -> int:
    """Most tokens that may be drawn after `prompt` tokens: `max_new_tokens` or `max_length`, and the context."""
    if "max_new_tokens" in request and "max_length" in request:
        raise ParameterError("max_new_tokens and max_length are both given; give one of them.")
    if "max_length" in request and request["max_length"] <= prompt:
        raise PromptError(f"the prompt has {prompt} tokens, but max_length is {request['max_length']}; raise it.")
    wanted = PARAMETERS["max_new_tokens"].default
    for source in (request, model):
        if "max_new_tokens" in source:
            wanted = source["max_new_tokens"]
            break
        if source.get("max_length", 0) > prompt:  # a model's own limit that the prompt exceeds is no limit
            wanted = source["max_length"] - prompt
            break
    return min(wanted, limits.tokens - prompt)


def _check_prompt(prompt: Sequence[int], limits: Limits, which: str) -> None:
    if not prompt:
        raise PromptError(f"{which} is empty and the tokenizer has no BOS token to start from; give some text.")
    if len(prompt) > limits.context_length:
        raise PromptError(
            f"{which} has {len(prompt)} tokens, the model's context holds {limits.context_length}; shorten it."
        )
    if len(prompt) > limits.tokens:
        raise PromptError(
            f"{which} has {len(prompt)} tokens, but the model was opened with max_length {limits.tokens}; "
            "shorten it, or open the model for more."
        )
    for token in prompt:
        if not 0 <= token < limits.vocab_size:
            raise PromptError(f"{which} holds the token id {token}, but ids go from 0 to {limits.vocab_size - 1}.")


def _check_ids(name: str, ids: Any, limits: Limits) -> None:
    for token in ids:
        if token >= limits.vocab_size:
            raise ParameterError(f"{name} names the token id {token}, but ids go from 0 to {limits.vocab_size - 1}.")
