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
from topw_deploy.runtime.structured.guide import Guide, MaskLayout
from topw_deploy.runtime.structured.lark import to_lark

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


class Grammars:
    """Compiles grammars for one model. Any thread may use it.

    vocab_size: V, the number of tokens of the graph.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, MaskLayout] | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # matchers at the start of their grammars

    def guides(self, rows: Sequence[tuple[Constraint | None, Collection[int]]]) -> list[Guide | None]:
        """Returns a started guide for each row with a constraint, and None for the others.

        rows: the constraint of each row, and the ids of the tokens that end its text.

        The last KEPT_GRAMMARS constraints are not compiled again. The first call with a constraint reads the
        vocabulary, which takes about a second for 150,000 tokens.

        Raises GrammarError for a grammar that is invalid, matches nothing or is too complex, and MissingPackageError
        without llguidance.
        """
        return [None if constraint is None else self._new_guide(constraint, ends) for constraint, ends in rows]

    def _new_guide(self, constraint: Constraint, ends: Collection[int]) -> Guide:
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


class _ThreadCall(Generic[Result]):
    """A call in another thread.

    results: the result, once the call has returned.
    error: its error, once it has failed.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.results.append(self._function())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            self.error = error


def call_with_deep_stack(function: Callable[[], Result], seconds: float) -> Result | None:
    """Call a function in a thread with a stack of STACK_BYTES. Returns its result.

    Returns None if the call takes longer than `seconds`; it then continues in the background.

    Raises the function's errors, and GenerationError if there is no address space for the stack.
    """
    call = _ThreadCall(function)
    thread = threading.Thread(target=call, name="topw-grammar", daemon=True)
    with _stack_size_lock:  # threading.stack_size applies to the whole process
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:
            raise GenerationError(
                f"there is no address space for a stack of {STACK_BYTES // 2**20} MiB to compile the grammar on; raise "
                "the process's limit."
            ) from None
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    if call.error is not None:
        raise call.error
    return call.results[0] if call.results else None
