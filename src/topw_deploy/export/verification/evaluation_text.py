"""Text for measuring perplexity and distances.

For the demo model, its held-out documents; for others, prose and Python's reference manual, which is part of most
installations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import TokenizerError
from topw_deploy.export.verification.quantised_checks import EvaluationText
from topw_deploy.manifest import DecoderManifest, Manifest, open_listed
from topw_deploy.sampling.likely_pairs import SAMPLE_TEXT, first_and_last_tokens, split_special_prefix

_COLUMNS = 256  # tokens in a row
_MOST, _FEWEST = 8192, 1024  # tokens of text
_MOST_WORK = 4 * 10**12  # multiply-adds per pass: under a minute on a few cores


def evaluation_text(folder: Path, manifest: DecoderManifest, parameters: int) -> EvaluationText | None:
    """The text as rows of tokens; None without tokenizer.json. parameters: the model's number of weights."""
    is_demo = manifest.source.get("id") == "demo"
    text, name = (_held_out(), "the demo's held-out text") if is_demo else _general()
    found = _encoding(folder, manifest, text)
    if found is None:
        return None
    start, body = _start_and_body(found, manifest.sampler.vocab_size)
    length = min(_COLUMNS, manifest.decoder.context_length, len(start) + len(body)) - len(start)
    count = min(max(1, tokens_for(parameters) // max(1, length)), len(body) // max(1, length))
    if length + len(start) < 2 or count < 1:
        return None
    rows = np.hstack([np.tile(start, (count, 1)), body[: count * length].reshape(count, length)])
    return EvaluationText(rows, len(start), name)


def page_ends(folder: Path, manifest: DecoderManifest, columns: int) -> list[np.ndarray]:
    """The first and the last tokens of a page of prose and code, each int64 [at most `columns`], behind the tokenizer's
    leading special tokens; [] without tokenizer.json.
    """
    found = _encoding(folder, manifest, SAMPLE_TEXT)
    if found is None:
        return []
    length = min(columns, manifest.decoder.context_length)
    return first_and_last_tokens(*_start_and_body(found, manifest.sampler.vocab_size), length)


def _start_and_body(found: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    return split_special_prefix(found.ids, found.special_tokens_mask, vocab_size)


def tokens_for(parameters: int) -> int:
    """Tokens to measure, by _MOST_WORK, within [_FEWEST, _MOST]."""
    return max(_FEWEST, min(_MOST, _MOST_WORK // max(1, 2 * parameters)))


def encoded(folder: Path, manifest: Manifest, text: str) -> list[int] | None:
    """Encode `text` with tokenizer.json; None without one.

    Raises ManifestError for a changed file, TokenizerError for an unreadable one.
    """
    found = _encoding(folder, manifest, text)
    return None if found is None else list(found.ids)


def _encoding(folder: Path, manifest: Manifest, text: str) -> Any:
    entry = manifest.files.get("tokenizer.json")
    if entry is None:
        return None
    from tokenizers import Tokenizer

    with open_listed(folder, "tokenizer.json", entry) as stream:
        data = stream.read()
    try:
        return Tokenizer.from_str(data.decode("utf-8")).encode(text)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} cannot be read ({reason}); export the model again."
        ) from None


def _held_out() -> str:
    from topw_deploy.demo.corpus import gather_corpus

    return "\n\n".join(sorted(gather_corpus().held_out))


def _general() -> tuple[str, str]:
    """General text and its name; some distributions package Python without its manual."""
    from topw_deploy.demo.corpus import topic_sections

    try:
        manual = "\n\n".join(topic_sections())
    except ImportError:
        return SAMPLE_TEXT, "prose and code"
    return f"{SAMPLE_TEXT}\n\n{manual}", "prose, code and Python's reference manual"
