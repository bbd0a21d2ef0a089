"""Byte-level BPE with one token per digit."""

from __future__ import annotations

from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.sums.problems import problems
from benchmarks.training import BOS, SPECIAL_TOKENS

SAMPLE = 6_000  # number of problems from which merges are learned
_PIECES = r" ?\p{L}+|\p{N}|#+| ?[^\s\p{L}\p{N}#]|\s"  # a word with its space, a digit, a punctuation mark


def train_tokenizer(vocab_size: int, sample: int = SAMPLE) -> Tokenizer:
    """Learn merges from the first training problems. Encoding prepends BOS but does not append EOS.

    vocab_size: includes three special tokens and the 256 bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p.prompt + p.completion for p in islice(problems(0), sample)), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]),
        ]
    )
    return tokenizer
