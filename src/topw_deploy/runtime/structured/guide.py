"""Which tokens a sequence may continue with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from topw_deploy.errors import GrammarError
from topw_deploy.runtime.structured.compiler_errors import step_error

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Vocabulary:
    """Which bits of llguidance's masks are tokens of the model.

    size: V, the number of the graph's tokens.
    known: uint32 [ceil(V / 32)], with a bit for every token that has a text. Padding rows of the embedding have none.

    llguidance's end of sequence is bit V, after the graph's tokens, because each request chooses which tokens of the
    graph end a sequence.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        has_text = np.array([bool(text) for text in texts], np.bool_)
        self.size = len(has_text)
        self.words = -(-self.size // 32)
        octets = np.zeros(self.words * 4, np.uint8)
        octets[: -(-self.size // 8)] = np.packbits(has_text, bitorder="little")
        self.known = octets.view("<u4").astype(np.uint32)


class Guide:
    """The position of one sequence in its grammar. Call `start` once, then `take` with each drawn token.

    mask: int32 [ceil(V / 32)], the tokens allowed next, in the layout of the graph's input `allowed`.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, ends: Iterable[int]) -> None:
        """ends: ids that end the sequence. They are allowed exactly where the grammar accepts."""
        self._matcher, self._vocabulary = matcher, vocabulary
        self._ends = np.zeros(vocabulary.words, np.uint32)
        for token in ends:
            self._ends[token // 32] |= np.uint32(1 << token % 32)
        self._others = ~self._ends
        self._computed = np.zeros(vocabulary.size // 32 + 1, np.uint32)  # with the bit V
        self._address, self._bytes = self._computed.ctypes.data, self._computed.nbytes
        self._tokens = self._computed[: vocabulary.words]
        self.mask = self._tokens.view(np.int32)

    def start(self) -> None:
        """Compute the mask of the first token.

        Raises GrammarError if no token is allowed, or the grammar is too complex.
        """
        if self._compute():
            raise GrammarError(
                "the grammar of structured_outputs allows only the empty text; give another one.", "structured_outputs"
            )

    def take(self, token: int) -> bool:
        """Add a drawn token that does not end the sequence, and compute the next mask. Returns whether the text is
        complete and cannot be continued.

        Raises GrammarError if the grammar became too complex.
        """
        matcher = self._matcher
        if not matcher.consume_token(token):
            raise step_error(matcher.get_error())
        return matcher.is_stopped() or self._compute()

    @property
    def allowed(self) -> int:
        """Number of allowed tokens."""
        return int(np.unpackbits(self._tokens.view(np.uint8)).sum())

    def _compute(self) -> bool:
        """Compute the mask. Returns whether the text is complete and cannot be continued."""
        matcher, tokens, size = self._matcher, self._tokens, self._vocabulary.size
        matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        accepts = bool(int(self._computed[size // 32]) >> size % 32 & 1)
        tokens &= self._vocabulary.known
        follows = bool(tokens.any())
        if not follows:
            if matcher.is_error():
                raise step_error(matcher.get_error())
            return True
        if accepts:
            tokens |= self._ends
            return False
        tokens &= self._others
        if not tokens.any():
            raise step_error("it allows only tokens that end the sequence, before its own end")
        return False
