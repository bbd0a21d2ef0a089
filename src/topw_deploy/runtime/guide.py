"""Compiles the constraints of requests for one model's vocabulary, and tracks which tokens a grammar allows next."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from topw_deploy import install
from topw_deploy.errors import GrammarError, TokenizerError, one_line
from topw_deploy.runtime.structured import Constraint, gbnf_rule_at, is_gbnf, to_lark
from topw_deploy.sampling.row import pack_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from topw_deploy.runtime.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
"""Maximum time to compile a grammar. All known grammars within the other limits take less than 3 seconds."""

LIMITS: Mapping[str, Any] = {"step_lexer_fuel": 50_000, "step_max_items": 20_000, "verbose_errors": False}
"""Bounds on llguidance's work for a mask. They are lower than its defaults, because all rows of an engine wait for a
mask.
"""

STACK_BYTES = 256 * 2**20
"""Size of the stack that compiles a grammar. Only its used part takes memory; the deepest grammars use a tenth."""

KEPT_GRAMMARS = 64
"""Compiled grammars that a model keeps for later requests. The least recently used is dropped first."""

_END_TEXT = b"<|topw: end of the grammar|>"
_stack_size_lock = threading.Lock()
Result = TypeVar("Result")


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
        self.vocab_size, self.with_text = len(has_text), pack_mask(has_text).view(np.uint32)
        self.words = len(self.with_text)


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


class Grammars:
    """Compiles grammars for one model. Any thread may use it.

    vocab_size: V, the number of tokens of the graph.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, MaskLayout] | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # matchers at the start of their grammars

    def guide(self, constraint: Constraint, ends: Collection[int]) -> Guide:
        """A started guide.

        ends: ids of the tokens that end the text.

        The last KEPT_GRAMMARS constraints are not compiled again. The first call reads the vocabulary, which takes
        about a second for 150,000 tokens.

        Raises GrammarError for a grammar that is invalid, matches nothing or is too complex, and MissingPackageError
        without llguidance.
        """
        tokens, layout = self._read_vocabulary()
        try:
            guide = Guide(self._new_matcher(constraint, tokens), layout, ends)
            guide.start()
        except GrammarError as error:
            raise GrammarError(
                f"structured_outputs: {str(error).removeprefix('structured_outputs: ')}",
                "structured_outputs",
                line=error.line,
                column=error.column,
            ) from None
        return guide

    def _new_matcher(self, constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
        """A new matcher at the start of the grammar, which is compiled unless it is kept."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
        if found is None:
            found = compile_grammar(constraint, tokens)  # without the lock, because compiling may take seconds
            with self._lock:
                self._compiled[constraint] = found
                while len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        return found.deep_copy()

    def _read_vocabulary(self) -> tuple[LLTokenizer, MaskLayout]:
        with self._lock:
            if self._vocabulary is None:
                install.require("structured output", "structured")
                texts, special = self._tokenizer.token_bytes(self._size)
                self._vocabulary = read_tokens(texts, special), MaskLayout(texts)
            return self._vocabulary


def read_tokens(texts: list[bytes], special: list[int]) -> LLTokenizer:
    """Returns the vocabulary in llguidance's form. Raises TokenizerError if llguidance cannot use it.

    texts, special: see `Tokenizer.token_bytes`.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(_TokenizerWrapper(texts, special))
    except (ValueError, TypeError) as error:
        raise TokenizerError(f"llguidance cannot use the tokenizer ({one_line(error, 200)}).") from None


class _TokenizerWrapper:
    """The attributes that LLTokenizer reads: the tokens' texts, and an additional end-of-sequence token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: list[bytes], special: list[int]) -> None:
        self.eos_token_id = len(texts)
        self.tokens = [*texts, _END_TEXT]
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("llguidance tokenizes no text with `no_forcing`; see lark.py")


def compile_grammar(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """Compile a grammar. Returns a matcher at its start; copy the matcher for each sequence.

    Raises GrammarError for a grammar that is invalid or takes longer than COMPILE_SECONDS.
    """
    from llguidance import LLMatcher, LLParserLimits

    def new_matcher() -> LLMatcher:
        return LLMatcher(tokens, to_lark(constraint), log_level=0, limits=LLParserLimits(**LIMITS))

    matcher = call_with_deep_stack(new_matcher, COMPILE_SECONDS)
    if matcher is None:
        raise GrammarError(f"the grammar takes longer than {COMPILE_SECONDS:.0f} s to compile; give a simpler one.")
    if matcher.is_error():
        raise compile_error(constraint, matcher.get_error())
    return matcher


def call_with_deep_stack(function: Callable[[], Result], seconds: float) -> Result | None:
    """Call a function in a thread with a stack of STACK_BYTES. Returns its result.

    Returns None if the call takes longer than `seconds`; it then continues in the background.

    Raises the function's errors.
    """
    called: Future[Result] = Future()

    def call() -> None:
        try:
            called.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            called.set_exception(error)

    thread = threading.Thread(target=call, name="topw-grammar", daemon=True)
    with _stack_size_lock:  # threading.stack_size applies to the whole process
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    return called.result() if called.done() else None


_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n\s+\d+ \| ")
_NO_CONTINUATION = ("NoExtension", "NoExtensionBias")
_NOUNS = {"json": "the schema", "regex": "the expression", "choice": "the choices", "grammar": "the grammar"}


def compile_error(constraint: Constraint, message: str) -> GrammarError:
    """The error for a constraint that does not compile. message: llguidance's."""
    what = _NOUNS[constraint.kind]
    message = message.replace("<non-verbose/>", "").strip()
    place = _PLACE.match(message)
    why = _EXCERPT.split(message[place.end() :] if place else message)[0]
    if "regex parse error:" in message:
        why = message.rpartition("error: ")[2].partition("\n")[0]
    if constraint.kind == "grammar" and place:
        line, column = int(place[1]), int(place[2])
        if is_gbnf(constraint.text):
            name, line = gbnf_rule_at(constraint.text, line)
            return GrammarError(f"{what} does not compile: {_as_clause(why)} (rule {name}, line {line}).", line=line)
        where = f"(line {line}, column {column})"
        return GrammarError(f"{what} does not compile: {_as_clause(why)} {where}.", line=line, column=column)
    return GrammarError(f"{what} does not compile: {_as_clause(why.removeprefix('failed to compile JSON schema: '))}.")


def step_error(message: str) -> GrammarError:
    """The error for a grammar that becomes too complex during generation, or allows no next token."""
    why = _as_clause(message.replace("<non-verbose/>", ""))
    if why in _NO_CONTINUATION:
        return GrammarError(
            "the grammar of structured_outputs allows no continuation; give another one.", "structured_outputs"
        )
    return GrammarError(f"the grammar of structured_outputs failed: {why}; give a simpler one.", "structured_outputs")


def _as_clause(message: str) -> str:
    """A message as one line without a full stop."""
    return one_line(ValueError(message)).rstrip(" .;,")
