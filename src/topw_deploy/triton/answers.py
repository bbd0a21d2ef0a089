"""Turns a Triton request into a request to the engine, and the engine's pieces into Triton responses."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import numpy as np

from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import GenerationResult
from topw_deploy.runtime.parameters import names_in_json, unknown_parameter_error

NAMES = names_in_json() | {"max_time"}

ReadInput = Callable[[str], "np.ndarray | None"]
"""Returns the values of the input with a name; None if the request has no such input."""


def read_request(read: ReadInput) -> tuple[str | list[int], dict[str, Any], bool]:
    """Check the inputs of a request.

    Returns (text or token ids, parameters of `Engine.stream`, whether each piece of text gets a response).

    Raises PromptError unless exactly one of text_input and input_ids is given, and for a text that is not UTF-8. Raises
    ParameterError for parameters that are not a JSON object, for an unknown name, and for a seed that is given twice.
    """
    text, ids = read("text_input"), read("input_ids")
    prompt: str | list[int]
    if text is not None and ids is None:
        prompt = _read_text("text_input", text)
    elif ids is not None and text is None:
        prompt = [int(token) for token in np.ravel(ids)]
    else:
        raise PromptError("the request has no prompt, or two; give either text_input or input_ids.")
    parameters = _parameters(read("parameters"))
    seed, stream = read("seed"), read("stream")
    if seed is not None:
        if "seed" in parameters:
            raise ParameterError("seed is given twice, as an input and in parameters; give it once.", "seed")
        parameters["seed"] = int(_single_value("seed", seed))
    return prompt, parameters, stream is not None and bool(_single_value("stream", stream))


def _parameters(given: np.ndarray | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        found = json.loads(_read_text("parameters", given) or "{}")
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"parameters is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ParameterError(f"parameters is a JSON {type(found).__name__}, but must be an object.")
    unknown = next((name for name in found if name not in NAMES), None)
    if unknown is not None:
        raise unknown_parameter_error(unknown[:80], NAMES)
    return {name: value for name, value in found.items() if value is not None}


def _read_text(name: str, value: np.ndarray) -> str:
    one = _single_value(name, value)
    try:
        return one.decode("utf-8") if isinstance(one, bytes) else str(one)
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 at byte {error.start}.") from None


def _single_value(name: str, value: np.ndarray) -> Any:
    if value.size != 1:
        raise ParameterError(f"{name} has {value.size} values, but must have one.")
    return value.reshape(-1)[0]


async def response_outputs(
    engine: Engine, prompt: str | list[int], parameters: Mapping[str, Any], streams: bool
) -> AsyncGenerator[dict[str, np.ndarray], None]:
    """Yield the outputs of each response, by name; an empty dictionary for a piece without a response.

    A stream has a response per piece of text; the last one of each sequence has `token_ids` and `finish_reason`. Any
    other request has one response per sequence. Closing the generator frees the rows.

    Raises the errors of `Engine.stream`.
    """
    async for piece in engine.stream(prompt, **parameters):
        result = piece.result
        if streams:
            yield _outputs(piece.text, piece.row, result)
        elif result is not None:
            yield _outputs(result.text, piece.row, result)
        else:
            yield {}  # lets the caller check whether the request was cancelled


def _outputs(text: str, index: int, result: GenerationResult | None) -> dict[str, np.ndarray]:
    ids = [] if result is None else result.token_ids
    reason = "" if result is None else result.finish_reason
    return {
        "text_output": np.array([text.encode("utf-8", "replace")], np.object_),
        "token_ids": np.array(ids, np.int64),
        "finish_reason": np.array([reason.encode()], np.object_),
        "seed": np.array([0 if result is None else result.seed], np.uint64),
        "index": np.array([index], np.int32),
    }
