"""The text of token ids, with the tokens of a tool-call format.

`GenerationResult.text` leaves out special tokens, and in many tokenizers the markers of calls are special.
"""

from __future__ import annotations

from topw_deploy.runtime.results import GenerationResult
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools.family import Family


def marked_text(result: GenerationResult, tokenizer: Tokenizer, family: Family) -> str:
    """The result's text with `family`'s markers, but without other special tokens, end of sequence and stop string."""
    special = tokenizer.special_ids
    if not any(text in family.markers for text in special.values()):
        return result.text
    ids = [token for token in result.token_ids if special.get(token, family.markers[0]) in family.markers]
    if result.finish_reason == "stop" and isinstance(result.stop, str):
        return _cut(tokenizer, ids, result.stop)
    return tokenizer.decode(ids[:-1] if ids[-1:] == [result.stop] else ids, False)


def _cut(tokenizer: Tokenizer, ids: list[int], stop: str) -> str:
    """Cut at the stop string, which the last token completed."""
    text = tokenizer.decode(ids, False)
    last = len(tokenizer.decode(ids[:-1], False))
    found = text.find(stop, max(0, last - len(stop) + 1))
    return text if found < 0 else text[:found]
