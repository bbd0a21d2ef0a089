"""Read prompts (texts, token ids, arrays, tensors, tokenizer outputs) and banned words (vLLM's `bad_words`).

Tensors are read with their method `tolist`, without an import of their library.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Encoding

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime.parameters import PARAMETERS, is_boolean
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.text import short_repr

Prompt: TypeAlias = "str | list[int]"
LengthCheck: TypeAlias = "Callable[[int, str], None]"

_BAD_WORDS, _BAD_WORDS_IDS = "bad_words", "bad_words_ids"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_IGNORED_INPUTS = frozenset({"special_tokens_mask", "offset_mapping", "length"})  # no effect on tokens


def split_inputs(prompt: Any, given: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Returns (prompt, attention mask or None, other parameters) of a call.

    The prompt may come as keywords: `generate(**tokenizer(text))`. Raises PromptError for no prompt or two prompts.
    """
    parameters = dict(given)
    inputs = {name: parameters.pop(name) for name in _INPUTS if name in parameters}
    if prompt is not None and inputs.get("input_ids") is not None:
        raise PromptError("a prompt and input_ids are both given; give one of them.")
    if prompt is None:
        prompt = inputs.get("input_ids")
    if prompt is None:
        raise PromptError("there is no prompt; give a text, token ids, a list of either, or input_ids.")
    _check_segments(inputs.get("token_type_ids"))
    return prompt, inputs.get("attention_mask"), parameters


def read_prompts(
    prompt: Any, attention_mask: Any = None, check: LengthCheck = lambda tokens, which: None
) -> tuple[list[Prompt], bool]:
    """Returns (each prompt as text or ids, whether `prompt` is a single one).

    attention_mask: masked tokens, on either side, are removed.
    check: called with the length and the name of each prompt of ids without a mask, before its ids are read.

    Raises PromptError for other types, or a mask that does not fit or has a hole.
    """
    prompt, mask = _unwrap_mapping(prompt, attention_mask)
    batched = getattr(prompt, "ndim", 1) > 1
    if mask is None:
        _check_array_length(prompt, check)
    prompt, mask = to_lists(prompt), to_lists(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), "the prompt")
    if not isinstance(prompt, (str, list, tuple)):
        raise PromptError(
            f"the prompt is a {type(prompt).__name__}, but must be a text, token ids, or a list of either."
        )
    if isinstance(prompt, str) or (not batched and all(_is_scalar(item) for item in prompt)):
        return [_read_prompt(prompt, mask, "the prompt", check)], True
    if not prompt:
        raise PromptError("the batch has no prompts; give at least one.")
    masks = [None] * len(prompt) if mask is None else mask
    if not isinstance(masks, (list, tuple)) or len(masks) != len(prompt):
        raise PromptError(
            f"attention_mask does not fit the {len(prompt)} prompts; give one row of it for each of them."
        )
    rows = enumerate(zip(prompt, masks, strict=True))
    return [_read_prompt(item, mask, f"prompt {i}", check) for i, (item, mask) in rows], False


def _check_array_length(prompt: Any, check: LengthCheck) -> None:
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu" and prompt.ndim in (1, 2) and prompt.size:
        check(prompt.shape[-1], "the prompt" if prompt.ndim == 1 else "prompt 0")


def to_lists(value: Any) -> Any:
    """Convert arrays and tensors to nested lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    return value


def _unwrap_mapping(prompt: Any, mask: Any) -> tuple[Any, Any]:
    if isinstance(prompt, Encoding):
        prompt = {"input_ids": prompt.ids, "attention_mask": prompt.attention_mask}
    if not isinstance(prompt, Mapping):
        return prompt, mask
    if prompt.get("input_ids") is None:
        raise PromptError(f"the prompt is a mapping of {short_repr(sorted(map(str, prompt)))}; it must have input_ids.")
    unknown = sorted(str(name) for name in prompt if name not in _IGNORED_INPUTS and name not in _INPUTS)
    if unknown:
        raise PromptError(
            f"the prompt is a mapping with {', '.join(unknown)}, which a decoder cannot read; give input_ids and "
            "attention_mask alone."
        )
    _check_segments(prompt.get("token_type_ids"))
    inner = prompt.get("attention_mask")
    if inner is not None and mask is not None:
        raise PromptError("attention_mask is given twice, as an argument and in the prompt; give it once.")
    return prompt["input_ids"], mask if inner is None else inner


def _read_prompt(prompt: Any, mask: Any, which: str, check: LengthCheck) -> Prompt:
    if isinstance(prompt, str):
        if mask is not None:
            raise PromptError(f"{which} is a text, but attention_mask is for token ids; omit it.")
        return prompt
    prompt, mask = _unwrap_mapping(prompt, mask)
    prompt, mask = to_lists(prompt), to_lists(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), which)
    if not isinstance(prompt, (list, tuple)) or not all(_is_scalar(item) for item in prompt):
        raise PromptError(f"{short_repr(prompt)} is neither a text nor a list of token ids.")
    ids = _read_ids(prompt, which)
    return ids if mask is None else _remove_masked(ids, mask, which)


def _read_ids(prompt: Sequence[Any], which: str) -> list[int]:
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    ids = []
    for position, value in enumerate(prompt):
        try:
            ids.append(operator.index(value if not is_boolean(value) else None))  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(
                f"{which} holds {short_repr(value)} at position {position}, but token ids are integers; give only ids."
            ) from None
    return ids


def _remove_masked(ids: list[int], mask: Any, which: str) -> list[int]:
    if not isinstance(mask, (list, tuple)) or not all(_is_scalar(m) for m in mask) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, (list, tuple)) else 1
        raise PromptError(
            f"attention_mask has {length} values for {which}, which has {len(ids)} tokens; give one for each token."
        )
    odd = [m for m in mask if m not in (0, 1)]
    if odd:
        raise PromptError(f"attention_mask has {short_repr(odd[0])} for {which}, but must be 0 or 1.")
    kept = [position for position, m in enumerate(mask) if m]
    if not kept:
        return []
    first, last = kept[0], kept[-1]
    if last - first + 1 != len(kept):
        hole = next(position for position in range(first, last) if not mask[position])
        raise PromptError(
            f"attention_mask masks position {hole} in the middle of {which}, but may mask only padding before the "
            "first token or after the last one."
        )
    return ids[first : last + 1]


def _check_segments(segments: Any) -> None:
    """Raises PromptError unless `segments`, the token_type_ids that some tokenizers add, are all 0."""
    if segments is not None and _has_nonzero(segments):
        raise PromptError("token_type_ids has values other than 0, but a decoder has only one segment; omit it.")


def _has_nonzero(value: Any) -> bool:
    value = to_lists(value)
    return any(map(_has_nonzero, value)) if isinstance(value, (list, tuple)) else bool(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) or getattr(value, "ndim", None) == 0


def encode_bad_words(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Replace `bad_words` among a request's parameters by `bad_words_ids`.

    Two tokenizations of each word are banned: at the start of a text, and after a space.

    Raises ParameterError for other values than texts, a text without tokens, or both names.
    """
    if _BAD_WORDS not in given:
        return dict(given)
    if _BAD_WORDS_IDS in given:
        raise ParameterError(f"{_BAD_WORDS} and {_BAD_WORDS_IDS} are both given; give one of them.", _BAD_WORDS)
    others = {name: value for name, value in given.items() if name != _BAD_WORDS}
    value, parameter = given[_BAD_WORDS], PARAMETERS[_BAD_WORDS]
    if parameter.lists_values(value):
        rows = [None if v is None else _encode_words(parameter.read(_BAD_WORDS, v), tokenizer) for v in value]
        return {**others, _BAD_WORDS_IDS: rows}
    return {**others, _BAD_WORDS_IDS: _encode_words(parameter.read(_BAD_WORDS, value), tokenizer)}


def _encode_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}  # ordered
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ParameterError(
                    f"{_BAD_WORDS} has {short_repr(word)}, which has no tokens; remove it.", _BAD_WORDS
                )
            found[ids] = None
    return tuple(found)
