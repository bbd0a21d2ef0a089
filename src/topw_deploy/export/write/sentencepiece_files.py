"""Compare a converted tokenizer with the SentencePiece model it was made from.

transformers converts by the tokenizer's class, or by general rules if the folder names no class. Those rules ignore
some settings of a SentencePiece model, such as the space before a text.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAMPLES = (
    "the lazy dog",
    "a list of words",
    "The quick brown fox jumps over the lazy dog; then it returns 42 words!",
    "Wir fahren morgen nach München.",
    "東京は日本の首都です",
)


def difference(model: Path, converted: Path) -> str | None:
    """Describe the first sample that `converted`, a tokenizer.json, splits differently from `model`; None if none.

    Skips samples with pieces unknown to the model, and models that SentencePiece cannot read.
    """
    import sentencepiece

    try:
        reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError):
        return None
    tokenizer = Tokenizer.from_file(str(converted))
    for sample in _SAMPLES:
        ids = reference.encode(sample)
        expected = [reference.id_to_piece(number) for number in ids]
        found = tokenizer.encode(sample, add_special_tokens=False).tokens
        if reference.unk_id() not in ids and found != expected:
            return f"{sample!r} becomes {found[:6]} instead of {expected[:6]}"
    return None
