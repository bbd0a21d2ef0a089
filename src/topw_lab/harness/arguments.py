"""Checks `--model_args`: how to open the model, and the parameters of every request."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, is_boolean, read_values
from topw_deploy.sampling.parameters import unknown_name
from topw_deploy.sampling.seeds import SEED_BITS

ROWS = 8  # the default of Engine
_DEFAULT_DEVICE = "cuda:0"  # the harness passes it if --device is not given

OPENING_ARGUMENTS = (
    "provider", "intra_op_num_threads", "inter_op_num_threads", "allow_fallback", "sampler", "max_length",
)  # fmt: skip
"""Arguments passed to `TopWModel.from_pretrained`."""

ENGINE_ARGUMENTS = ("kv_bytes", "prefill_budget", "reuse_prefixes", "prefix_bytes", "exact")
"""Arguments passed to `Engine`."""

OWN_ARGUMENTS = (
    "path", "batch_size", "max_batch_size", "device", "max_gen_toks", "seed", "chat_template_args", "enable_thinking",
    "think_end_token",
)  # fmt: skip

_INSTEAD = {
    "pretrained": "path",
    "model": "path",
    "max_new_tokens": "max_gen_toks, or --gen_kwargs max_gen_toks=N to override the tasks",
}
"""Name that a user may try -> what to give instead."""

_CHANGING_RESULTS = frozenset({
    "num_return_sequences", "logprobs", "prompt_logprobs", "streamer", "stopping_criteria", "generation_config",
})  # fmt: skip
"""Parameters that change what a request returns."""


_MOST_DIGITS = 400  # of an integer in text; Python refuses to read more than 4300


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Checked arguments.

    path: the exported folder.
    opening: keyword arguments of `TopWModel.from_pretrained`.
    engine: keyword arguments of `Engine`.
    rows: number of sequences that run at once.
    max_gen_toks: maximum number of new tokens for tasks that do not state it.
    seed: seed of the run; None if it is not given.
    template: variables of the chat template.
    think_end_token: text that ends a model's reasoning; None for models without.
    parameters: parameters of every generation, by the names of `TopWModel.generate`. They override those of tasks.
    """

    path: str
    opening: Mapping[str, Any]
    engine: Mapping[str, Any]
    rows: int
    max_gen_toks: int
    seed: int | None
    template: Mapping[str, Any]
    think_end_token: str | None
    parameters: Mapping[str, Any]


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Check `--model_args`.

    Raises ParameterError for a missing path, an unknown name, or an invalid value. `TopWModel.from_pretrained` and
    `Engine` check the values of `opening` and `engine`.
    """
    stated = {name: value for name, value in given.items() if value is not None}
    own = {name: stated.pop(name) for name in OWN_ARGUMENTS if name in stated}
    opening = {name: stated.pop(name) for name in OPENING_ARGUMENTS if name in stated}
    engine = {name: stated.pop(name) for name in ENGINE_ARGUMENTS if name in stated}
    parameters = _read_parameters(stated)
    path = own.get("path", "")
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ParameterError("path is missing; give --model_args path=OUT with an exported folder.", "path")
    if own.get("device") == "cpu":
        opening.setdefault("provider", "cpu")
    elif own.get("device", _DEFAULT_DEVICE) != _DEFAULT_DEVICE:
        raise ParameterError(
            f"device is {own['device']!r:.60}, but must be cpu; give --model_args provider=cuda or tensorrt for a GPU.",
            "device",
        )
    seed = own.get("seed")
    return Arguments(
        path=str(path),
        opening=opening,
        engine=engine,
        rows=_read_rows(own.get("batch_size"), own.get("max_batch_size")),
        max_gen_toks=_read_integer("max_gen_toks", own.get("max_gen_toks", 256)),
        seed=None if seed is None else _read_integer("seed", seed, 0, 2**SEED_BITS),
        template=_template_variables(own),
        think_end_token=_read_text("think_end_token", own.get("think_end_token")),
        parameters=parameters,
    )


def _read_parameters(stated: Mapping[str, Any]) -> dict[str, Any]:
    for name in stated:
        ours = ALIASES.get(name, name)
        if name in _INSTEAD or ours in _INSTEAD:
            raise ParameterError(
                f"{name} is not an argument of this model; give {_INSTEAD.get(name, _INSTEAD.get(ours))}."
            )
        if ours in _CHANGING_RESULTS:
            raise ParameterError(f"{name} changes what a request returns, which the harness cannot use; remove it.")
        if ours not in PARAMETERS and difflib.get_close_matches(
            name, (*OWN_ARGUMENTS, *OPENING_ARGUMENTS, *ENGINE_ARGUMENTS), n=1
        ):
            raise unknown_name(name, [*OWN_ARGUMENTS, *OPENING_ARGUMENTS, *ENGINE_ARGUMENTS, *PARAMETERS])
    return read_values(stated)


def _read_rows(size: Any, most: Any) -> int:
    """The number of rows: `--batch_size`, but at most `--max_batch_size`. "auto" is the engine's default."""
    bound = None if most is None else _read_integer("max_batch_size", most)
    if isinstance(size, str) and size.partition(":")[0] == "auto":
        size = None
    rows = ROWS if size is None else _read_integer("batch_size", size)
    return rows if bound is None else min(rows, bound)


def _read_integer(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    text = isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS
    number = int(value) if text or (isinstance(value, int) and not is_boolean(value)) else None
    if number is None or number < low or (high is not None and number >= high):
        bound = f">= {low}" if high is None else f"in [{low}, {high})"
        raise ParameterError(f"{name} is {value!r:.60}, but must be an integer {bound}.", name)
    return number


def _read_text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ParameterError(f"{name} is {value!r:.60}, but must be a non-empty text.", name)
    return value


def _template_variables(own: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template: `chat_template_args`, a mapping or its JSON text, and `enable_thinking`."""
    value = own.get("chat_template_args", {})
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ParameterError(
            f"chat_template_args is {own['chat_template_args']!r:.60}, but must be a JSON object, such as "
            '{"enable_thinking": false}.',
            "chat_template_args",
        )
    thinking = own.get("enable_thinking")
    return dict(value) if thinking is None else {**value, "enable_thinking": thinking}
