"""Tracks which tokens a sequence's grammar allows next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from topw_deploy.errors import GrammarError
from topw_deploy.runtime.structured.compiler_errors import step_error

if TYPE_CHECKING:
    from llguidance import LLMatcher


class MaskLayout:
    """The layout of llguidance's masks for one vocabulary: bit i is token i.

    vocab_size: V, the number of tokens of the graph.
    words: ceil(V / 32).
    with_text: uint32 [words], with the bits of all tokens that have a text. Padding rows of the embedding have none.

    Bit V is llguidance's end of sequence. It is no token of the graph, because each request chooses which tokens of the
    graph end a sequence.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        has_text = np.array([bool(text) for text in texts], np.bool_)
        self.vocab_size = len(has_text)
        self.words = -(-self.vocab_size // 32)
        octets = np.zeros(self.words * 4, np.uint8)
        octets[: -(-self.vocab_size // 8)] = np.packbits(has_text, bitorder="little")
        self.with_text = octets.view("<u4").astype(np.uint32)


class Guide:
    """The position of one sequence in its grammar. Call `start` once, then `take` with each drawn token.

    mask: int32 [ceil(V / 32)], the tokens that are allowed next, in the layout of the graph's input `allowed`.
    """

    def __init__(self, matcher: LLMatcher, layout: MaskLayout, ends: Iterable[int]) -> None:
        """ends: ids of the tokens that end the sequence. They are allowed exactly where the grammar may end."""
        self._matcher, self._layout = matcher, layout
        self._end_bits = np.zeros(layout.words, np.uint32)
        for token in ends:
            self._end_bits[token // 32] |= np.uint32(1 << token % 32)
        self._other_bits = ~self._end_bits
        self._mask_with_end = np.zeros(layout.vocab_size // 32 + 1, np.uint32)  # has also bit V
        self._address, self._bytes = self._mask_with_end.ctypes.data, self._mask_with_end.nbytes
        self._mask_words = self._mask_with_end[: layout.words]
        self.mask = self._mask_words.view(np.int32)

    def start(self) -> None:
        """Compute the mask of the first token.

        Raises GrammarError if no token is allowed, or the grammar is too complex.
        """
        if self._compute_mask():
            raise GrammarError(
                "the grammar of structured_outputs allows only the empty text; give another one.", "structured_outputs"
            )

    def take(self, token: int) -> bool:
        """Add a drawn token that does not end the sequence, and compute the next mask.

        Returns whether the grammar is complete and allows no further text.

        Raises GrammarError if the grammar became too complex.
        """
        matcher = self._matcher
        if not matcher.consume_token(token):
            raise step_error(matcher.get_error())
        return matcher.is_stopped() or self._compute_mask()

    @property
    def allowed_count(self) -> int:
        """Number of allowed tokens."""
        return int(np.unpackbits(self._mask_words.view(np.uint8)).sum())

    def _compute_mask(self) -> bool:
        """Compute the mask of the next token. Returns whether the grammar is complete and allows no further text."""
        matcher, tokens, size = self._matcher, self._mask_words, self._layout.vocab_size
        matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        accepts = bool(int(self._mask_with_end[size // 32]) >> size % 32 & 1)
        tokens &= self._layout.with_text
        follows = bool(tokens.any())
        if not follows:
            if matcher.is_error():
                raise step_error(matcher.get_error())
            return True
        if accepts:
            tokens |= self._end_bits
            return False
        tokens &= self._other_bits
        if not tokens.any():
            raise step_error("it allows only tokens that end the sequence, before its own end")
        return False
