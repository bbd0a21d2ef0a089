"""The text on which perplexity and distances are measured.

For the bundled model it is its held-out documents. For other models it is prose and the reference manual of Python,
which most installations contain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import TokenizerError
from topw_deploy.export.verification.quantised_checks import EvaluationText
from topw_deploy.manifest import DecoderManifest, Manifest, open_listed
from topw_deploy.sampling.geometry import SAMPLE_TEXT, first_and_last_tokens, split_special_prefix

_COLUMNS = 256  # tokens in each row
_LARGEST_BUDGET, _SMALLEST_BUDGET = 8192, 1024  # tokens of text
_LARGEST_WORK = 4 * 10**12  # multiply-adds of a model for the text: under a minute on a few cores


def evaluation_text(folder: Path, manifest: DecoderManifest, parameters: int) -> EvaluationText | None:
    """The text for perplexity, as rows of tokens; None without tokenizer.json or if the text is too short.

    parameters: the number of weights of the model, which limits the length of the text.
    """
    is_tiny = manifest.source.get("id") == "tiny"
    text, name = (_held_out_text(), "the tiny model's held-out text") if is_tiny else _general_text()
    found = _encode(folder, manifest, text)
    if found is None:
        return None
    start, body = _start_and_body(found, manifest.sampler.vocab_size)
    length = min(_COLUMNS, manifest.decoder.context_length, len(start) + len(body)) - len(start)
    count = min(max(1, token_budget(parameters) // max(1, length)), len(body) // max(1, length))
    if length + len(start) < 2 or count < 1:
        return None
    rows = np.hstack([np.tile(start, (count, 1)), body[: count * length].reshape(count, length)])
    return EvaluationText(rows, len(start), name)


def page_ends(folder: Path, manifest: DecoderManifest, columns: int) -> list[np.ndarray]:
    """The first and the last tokens of a page of prose and code, int64 [n] each; [] without tokenizer.json.

    Each begins with the tokenizer's leading special tokens and has at most `columns` tokens.
    """
    found = _encode(folder, manifest, SAMPLE_TEXT)
    if found is None:
        return []
    length = min(columns, manifest.decoder.context_length)
    return first_and_last_tokens(*_start_and_body(found, manifest.sampler.vocab_size), length)


def _start_and_body(found: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    return split_special_prefix(found.ids, found.special_tokens_mask, vocab_size)


def token_budget(parameters: int) -> int:
    """The number of tokens to measure with a model of this many weights."""
    return max(_SMALLEST_BUDGET, min(_LARGEST_BUDGET, _LARGEST_WORK // max(1, 2 * parameters)))


def encode(folder: Path, manifest: Manifest, text: str) -> list[int] | None:
    """Encode `text` with the export's tokenizer.json. Returns the ids, or None without the file.

    Raises ManifestError if the file was changed, and TokenizerError if it cannot be read.
    """
    found = _encode(folder, manifest, text)
    return None if found is None else list(found.ids)


def _encode(folder: Path, manifest: Manifest, text: str) -> Any:
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


def _held_out_text() -> str:
    """The documents that the bundled model was not trained on."""
    from topw_deploy.tiny.corpus import gather_corpus

    return "\n\n".join(sorted(gather_corpus().held_out))


def _general_text() -> tuple[str, str]:
    """The text for other models, and its name. Some distributions package Python without its manual."""
    from topw_deploy.tiny.corpus import topic_sections

    try:
        manual = "\n\n".join(topic_sections())
    except ImportError:
        return SAMPLE_TEXT, "prose and code"
    return f"{SAMPLE_TEXT}\n\n{manual}", "prose, code and Python's reference manual"
