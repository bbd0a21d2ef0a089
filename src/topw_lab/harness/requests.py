"""The parameters and the seed of a request of the harness, by the names of `TopWModel.generate`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.generation_config import has_no_effect
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.seeds import prompt_seed

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in the harness's order
_WHETHER_GREEDY = ("do_sample", "temperature")


def request_parameters(
    gen_kwargs: Mapping[str, Any], given: Mapping[str, Any], max_gen_toks: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The parameters of `TopWModel.generate` for a request, without its seed.

    gen_kwargs: those of the task and of `--gen_kwargs`. As in the harness, a request is greedy with do_sample=False,
        and without a temperature above 0 or do_sample=True.
    given: the parameters in `--model_args`. They override `gen_kwargs`; a temperature also overrides do_sample.
    max_gen_toks: maximum number of new tokens if `gen_kwargs` has no length.

    Raises ParameterError if `until` has another type than text or list of texts, or if `gen_kwargs` has a seed.
    """
    stated = {name: value for name, value in gen_kwargs.items() if value is not None}
    until = _until_texts(stated.pop("until", ()))
    lengths = [stated.pop(name) for name in _LENGTHS if name in stated]
    if "seed" in stated:
        raise ParameterError("gen_kwargs has a seed, but the seed is the run's; give --model_args seed=N.", "seed")
    greedy = {name: stated.pop(name) for name in _WHETHER_GREEDY if name in stated}
    if not given.keys() & _WHETHER_GREEDY:
        stated |= _sampling_parameters(greedy)
    stated = {name: value for name, value in stated.items() if _is_ours(name) or not has_no_effect(name, value)}
    return {
        "max_new_tokens": int(lengths[0]) if lengths else max_gen_toks,
        **_stop_parameters(until, tokenizer),
        **{name: value for name, value in stated.items() if ALIASES.get(name, name) not in given},
        **given,
    }


class Seeds:
    """Seeds of requests. Each depends on the run's seed, the prompt, and the number of earlier requests with it.

    So the draws of a request do not depend on `--limit`, the order, the number of rows, the rule or other tasks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._requests: Counter[str] = Counter()  # prompt -> number of its requests

    def next(self, prompt: str) -> int:
        """The seed, below 2**53, of the next request with this prompt."""
        count = self._requests[prompt]
        self._requests[prompt] += 1
        digest = hashlib.sha256(f"{count}\n{prompt}".encode("utf-8", "surrogatepass")).digest()
        return prompt_seed(self._seed, int.from_bytes(digest[:8], "little"))


def _is_ours(name: str) -> bool:
    return ALIASES.get(name, name) in PARAMETERS


def _sampling_parameters(greedy: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the harness's `do_sample` and `temperature` mean."""
    if greedy.get("do_sample") is False or not (greedy.get("do_sample") or greedy.get("temperature")):
        return {"temperature": 0.0}
    return dict(greedy)


def _until_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"until is {value!r:.60}, but must be a text or a list of texts.", "until")
    return [text for text in texts if text]


def _stop_parameters(until: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """The stop strings, and as stop ids those that are special tokens, because special tokens give no text."""
    special = {text: token for token, text in tokenizer.special_ids.items()}
    ids = [special[text] for text in until if text in special]
    return {**({"stop_token_ids": ids} if ids else {}), **({"stop_strings": until} if until else {})}
