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
from topw_deploy.runtime.parameters import PARAMETERS, is_boolean, show
from topw_deploy.runtime.tokenizer import Tokenizer

Prompt: TypeAlias = "str | list[int]"
Check: TypeAlias = "Callable[[int, str], None]"

_WORDS, _WORD_IDS = "bad_words", "bad_words_ids"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DESCRIPTIONS = frozenset({"special_tokens_mask", "offset_mapping", "length"})  # no effect on tokens


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
    prompt: Any, attention_mask: Any = None, check: Check = lambda tokens, which: None
) -> tuple[list[Prompt], bool]:
    """Returns (each prompt as text or ids, whether `prompt` is a single one).

    attention_mask: masked tokens, on either side, are removed.
    check: called with a prompt's length (without a mask, before its ids are read) and its name.

    Raises PromptError for other types, or a mask that does not fit or has a hole.
    """
    prompt, mask = _opened(prompt, attention_mask)
    batched = getattr(prompt, "ndim", 1) > 1
    if mask is None:
        _check_array(prompt, check)
    prompt, mask = plain(prompt), plain(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), "the prompt")
    if not isinstance(prompt, (str, list, tuple)):
        raise PromptError(
            f"the prompt is a {type(prompt).__name__}, but must be a text, token ids, or a list of either."
        )
    if isinstance(prompt, str) or (not batched and all(_is_scalar(item) for item in prompt)):
        return [_row(prompt, mask, "the prompt", check)], True
    if not prompt:
        raise PromptError("the batch has no prompts; give at least one.")
    masks = [None] * len(prompt) if mask is None else mask
    if not isinstance(masks, (list, tuple)) or len(masks) != len(prompt):
        raise PromptError(
            f"attention_mask does not fit the {len(prompt)} prompts; give one row of it for each of them."
        )
    rows = enumerate(zip(prompt, masks, strict=True))
    return [_row(item, mask, f"prompt {i}", check) for i, (item, mask) in rows], False


def _check_array(prompt: Any, check: Check) -> None:
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu" and prompt.ndim in (1, 2) and prompt.size:
        check(prompt.shape[-1], "the prompt" if prompt.ndim == 1 else "prompt 0")


def plain(value: Any) -> Any:
    """Convert arrays and tensors to nested lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    return value


def _opened(prompt: Any, mask: Any) -> tuple[Any, Any]:
    if isinstance(prompt, Encoding):
        prompt = {"input_ids": prompt.ids, "attention_mask": prompt.attention_mask}
    if not isinstance(prompt, Mapping):
        return prompt, mask
    if prompt.get("input_ids") is None:
        raise PromptError(f"the prompt is a mapping of {show(sorted(map(str, prompt)))}; it must have input_ids.")
    unknown = sorted(str(name) for name in prompt if name not in _DESCRIPTIONS and name not in _INPUTS)
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


def _row(prompt: Any, mask: Any, which: str, check: Check) -> Prompt:
    if isinstance(prompt, str):
        if mask is not None:
            raise PromptError(f"{which} is a text, but attention_mask is for token ids; omit it.")
        return prompt
    prompt, mask = _opened(prompt, mask)
    prompt, mask = plain(prompt), plain(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), which)
    if not isinstance(prompt, (list, tuple)) or not all(_is_scalar(item) for item in prompt):
        raise PromptError(f"{show(prompt)} is neither a text nor a list of token ids.")
    ids = _ids(prompt, which)
    return ids if mask is None else _unmasked(ids, mask, which)


def _ids(prompt: Sequence[Any], which: str) -> list[int]:
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    ids = []
    for position, value in enumerate(prompt):
        try:
            ids.append(operator.index(value if not is_boolean(value) else None))  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(
                f"{which} holds {show(value)} at position {position}, but token ids are integers; give only ids."
            ) from None
    return ids


def _unmasked(ids: list[int], mask: Any, which: str) -> list[int]:
    if not isinstance(mask, (list, tuple)) or not all(_is_scalar(m) for m in mask) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, (list, tuple)) else 1
        raise PromptError(
            f"attention_mask has {length} values for {which}, which has {len(ids)} tokens; give one for each token."
        )
    odd = [m for m in mask if m not in (0, 1)]
    if odd:
        raise PromptError(f"attention_mask has {show(odd[0])} for {which}, but must be 0 or 1.")
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
    """Raises PromptError unless all are 0, which some tokenizers add."""
    if segments is not None and _holds_one(segments):
        raise PromptError("token_type_ids has values other than 0, but a decoder has only one segment; omit it.")


def _holds_one(value: Any) -> bool:
    value = plain(value)
    return any(map(_holds_one, value)) if isinstance(value, (list, tuple)) else bool(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) or getattr(value, "ndim", None) == 0


def with_banned_ids(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Replace `bad_words` among a request's parameters by `bad_words_ids`.

    A word is banned as tokenized at the start of a text and after a space.

    Raises ParameterError for other values than texts, a text without tokens, or both names.
    """
    if _WORDS not in given:
        return dict(given)
    if _WORD_IDS in given:
        raise ParameterError(f"{_WORDS} and {_WORD_IDS} are both given; give one of them.", _WORDS)
    others = {name: value for name, value in given.items() if name != _WORDS}
    value, parameter = given[_WORDS], PARAMETERS[_WORDS]
    if parameter.is_per_row(value):
        rows = [None if v is None else _spelled(parameter.parse(_WORDS, v), tokenizer) for v in value]
        return {**others, _WORD_IDS: rows}
    return {**others, _WORD_IDS: _spelled(parameter.parse(_WORDS, value), tokenizer)}


def _spelled(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}  # ordered
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ParameterError(f"{_WORDS} has {show(word)}, which has no tokens; remove it.", _WORDS)
            found[ids] = None
    return tuple(found)
