"""Compiles the constraints of requests for one model's vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from topw_deploy import install
from topw_deploy.errors import GenerationError, GrammarError, TokenizerError, one_line
from topw_deploy.runtime.structured.compiler_errors import compile_error
from topw_deploy.runtime.structured.constraint import Constraint
from topw_deploy.runtime.structured.guide import Guide, Vocabulary
from topw_deploy.runtime.structured.lark import lark_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from topw_deploy.runtime.tokenizer import Tokenizer

SECONDS = 10.0
"""A grammar that takes longer to compile is refused. All known grammars within the limits take less than 3 seconds."""

LIMITS: Mapping[str, Any] = {"step_lexer_fuel": 50_000, "step_max_items": 20_000, "verbose_errors": False}
"""llguidance's limits on the work for a mask, lower than its defaults because all rows of an engine wait for a mask."""

STACK = 256 * 2**20
"""Bytes of the stack that compiles a grammar. Only the used part takes memory; the deepest grammars need a tenth."""

KEPT = 64
"""Compiled grammars that a model keeps for later requests. The least recently used is dropped first."""

_END = b"<|topw: end of the grammar|>"
_starting = threading.Lock()
Result = TypeVar("Result")


class Grammars:
    """Compiles grammars for one model. Any thread may use it.

    vocab_size: V, the number of the graph's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._made: tuple[LLTokenizer, Vocabulary] | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # at the start of their grammars

    def guides(self, rows: Sequence[tuple[Constraint | None, Collection[int]]]) -> list[Guide | None]:
        """A started guide for each row with a constraint, None for the others.

        rows: constraint, and ids of the tokens that end the text.

        The last KEPT constraints are not compiled again.

        The first call with a constraint reads the vocabulary, which takes about a second for 150,000 tokens.

        Raises GrammarError for a grammar that is invalid, matches nothing or is too complex, and MissingPackageError
        without llguidance.
        """
        return [None if constraint is None else self._guide(constraint, ends) for constraint, ends in rows]

    def _guide(self, constraint: Constraint, ends: Collection[int]) -> Guide:
        tokens, vocabulary = self._prepared()
        try:
            guide = Guide(self._matcher(constraint, tokens), vocabulary, ends)
            guide.start()
        except GrammarError as error:
            raise GrammarError(
                f"structured_outputs: {str(error).removeprefix('structured_outputs: ')}",
                "structured_outputs",
                line=error.line,
                column=error.column,
            ) from None
        return guide

    def _matcher(self, constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
        """A new matcher at the start of the grammar."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
        if found is None:
            found = compile_grammar(constraint, tokens)  # without the lock: it may take seconds
            with self._lock:
                self._compiled[constraint] = found
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return found.deep_copy()

    def _prepared(self) -> tuple[LLTokenizer, Vocabulary]:
        with self._lock:
            if self._made is None:
                install.require("structured output", "structured")
                texts, special = self._tokenizer.token_bytes(self._size)
                self._made = read_tokens(texts, special), Vocabulary(texts)
            return self._made


def read_tokens(texts: list[bytes], special: list[int]) -> LLTokenizer:
    """The vocabulary in llguidance's form. texts, special: see `Tokenizer.token_bytes`. Raises TokenizerError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(_Tokens(texts, special))
    except (ValueError, TypeError) as error:
        raise TokenizerError(f"llguidance cannot use the tokenizer ({one_line(error, 200)}).") from None


class _Tokens:
    """The attributes that LLTokenizer reads: the tokens' texts, and an end-of-sequence token of our own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: list[bytes], special: list[int]) -> None:
        self.eos_token_id = len(texts)
        self.tokens = [*texts, _END]
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("no text is tokenized: see `no_forcing` in lark.py")


def compile_grammar(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the start of the grammar; copy it for each sequence. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    def compiled() -> LLMatcher:
        return LLMatcher(tokens, lark_of(constraint), log_level=0, limits=LLParserLimits(**LIMITS))

    matcher = call_deep(compiled, SECONDS)
    if matcher is None:
        raise GrammarError(f"the grammar takes longer than {SECONDS:.0f} s to compile; give a simpler one.")
    if matcher.is_error():
        raise compile_error(constraint, matcher.get_error())
    return matcher


class _Call(Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.results.append(self._function())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            self.error = error


def call_deep(function: Callable[[], Result], seconds: float) -> Result | None:
    """The function's result, or None if it takes longer than `seconds`. It then continues in the background.

    Raises the function's errors, and GenerationError if there is no address space for the stack.
    """
    call = _Call(function)
    thread = threading.Thread(target=call, name="topw-grammar", daemon=True)
    with _starting:  # stack_size applies to the whole process
        before = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError:
            raise GenerationError(
                f"there is no address space for a stack of {STACK // 2**20} MiB to compile the grammar on; raise the "
                "process's limit."
            ) from None
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    if call.error is not None:
        raise call.error
    return call.results[0] if call.results else None
