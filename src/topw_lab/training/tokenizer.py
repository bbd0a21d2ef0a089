"""The demo model's tokenizer: byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)  # ids 0, 1, 2


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from `documents`. The tokenizer prepends BOS to a text, but does not append EOS.

    vocab_size: number of tokens, including three special tokens and one for each of the 256 bytes, so that no byte is
        unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
            ),
        ]
    )
    return tokenizer


def tokenizer_config(context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json, for a class that transformers 4 and 5 both have.

    context: maximum number of tokens.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
    }
