"""`topw generate` and `topw chat`. Only generated text, echoed prompts and JSON lines go to stdout."""

from __future__ import annotations

import contextlib
import os
import stat
import statistics
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from topw_deploy.cli.batch import Run, answer_file, prompt_file_options, take_prompt_files
from topw_deploy.cli.options import (
    CONTEXT,
    COUNT,
    OPTION_PARAMETERS,
    PATH,
    SHORT_FLAGS,
    constraint_options,
    draft_model_option,
    flag_of,
    model_option,
    opening_options,
    option_group,
    parameter_options,
    take_constraint,
    take_given,
    take_opening,
    take_words,
)
from topw_deploy.cli.prompts import user_messages
from topw_deploy.cli.terminal import read_source, say_json, tell, waiting, write, write_generated
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.sampling.parameters import unknown_name
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, TOP_W
from topw_deploy.text import decode_text

if TYPE_CHECKING:
    from topw_deploy.runtime import GenerationResult, Piece, TopWModel


_CHAT_PARAMETERS = tuple(name for name in OPTION_PARAMETERS if name not in ("num_return_sequences", "logprobs"))
_TOP_W_PARAMETERS = ("preset", "lam", "beta", "init_top_p", "geom_scale", "geom_unit")  # no other rule reads these
_answer_options = option_group(
    click.option("--system", metavar="TEXT", help="System message of the chat."),
    click.option("--stats", is_flag=True, help="Print speed, kept tokens and the certified share to stderr."),
    parameter_options(*_CHAT_PARAMETERS),
    click.option("--greedy", is_flag=True, help="Always draw the likeliest token: --temperature 0."),
    constraint_options,
    click.option(
        "--max-context",
        type=COUNT,
        help="Maximum number of tokens of prompt and answer together; also sizes the cache. Default: the model's "
        "context.",
    ),
    click.option("--prefill-chunk", type=COUNT, help="Maximum number of prompt tokens per run; fewer save memory."),
    opening_options,
    draft_model_option,
)
"""The options of `topw generate` and `topw chat`; `_take_answer_options` takes most of their values."""


@click.command(name="generate", context_settings=CONTEXT)
@click.argument("words", metavar="MODEL [PROMPT]", nargs=-1)
@model_option
@click.option("-p", "--prompt", metavar="TEXT", help="PROMPT, given as an option.")
@click.option("-f", "--file", "prompt_file", type=PATH, help="Read the prompt from a file (UTF-8).")
@prompt_file_options
@click.option("--chat", is_flag=True, help="Use the chat template: answer PROMPT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sequence, each on a line.")
@click.option("--stream/--no-stream", default=True, help="Print text as it is generated, or at the end.")
@parameter_options("num_return_sequences", "logprobs")
@click.option("--echo/--no-echo", default=None, help="Print the prompt before each text.  [default: on a terminal]")
@_answer_options
def generate(
    words: tuple[str, ...],
    model: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    as_json: bool,
    stream: bool,
    echo: bool | None,
    system: str | None,
    stats: bool,
    **options: Any,
) -> None:
    """Continue PROMPT with the exported model in the folder MODEL. `topw run` is the same command.

    Text that is piped to standard input comes before PROMPT, or is the prompt if none is given. PROMPT may also be -
    for standard input. One line break at the end of a file or of standard input is ignored.

    With --prompts-jsonl, each line of the file is a JSON string, or an object with "prompt", "prompt_ids" or
    "messages", an "id" and parameters for this prompt. One JSON object per sequence is written, in the order of the
    prompts. A prompt that fails gets a line with "error", and the exit code is then 1.
    """
    model, *rest = take_words(words, MODEL=model)
    folder = Path(model)
    if rest and prompt is not None:
        raise click.UsageError("PROMPT is given twice, as an argument and as an option.")
    if len(rest) > 1:
        raise click.UsageError(f"the prompt is given as {len(rest)} words; put it in quotes: {' '.join(rest)!r:.60}")
    prompt = rest[0] if rest else prompt
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    files = take_prompt_files(options)
    if files is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("give only one of PROMPT, --file and --prompts-jsonl.")
    text = _read_prompt(prompt, prompt_file) if files is None else ""
    opening, generation = _take_answer_options(options)
    prints_json = as_json or files is not None
    if "logprobs" in generation and not prints_json:
        raise click.UsageError("--logprobs needs --json, which shows them.")
    if echo is not None and prints_json:
        raise click.UsageError("--echo is for text, but --json and --prompts-jsonl print JSON; omit it.")
    if files is not None:
        limit = opening["max_length"]
        run = Run(**files, parameters=generation, chat=chat, system=system, max_context=limit, stats=stats)
        answer_file(lambda: _open_model(folder, opening), run)
        return
    echo = (not chat and sys.stdout.isatty()) if echo is None else echo
    with _open_model(folder, opening) as opened:
        if chat:
            pieces = opened.stream_chat(user_messages(system, text), **generation)
        else:
            pieces = opened.stream(text, **generation)
        if as_json or not stream:
            with waiting("Generating"):
                pieces = iter(list(pieces))
        if as_json:
            results = _show_json_lines(pieces)
        else:
            several = generation.get("num_return_sequences", 1)
            results = _show_text(pieces, several, text if echo else "")
        if stats:
            _report_stats(results)


@click.command(name="chat", context_settings=CONTEXT)
@click.argument("words", metavar="MODEL", nargs=-1)
@model_option
@_answer_options
def chat(words: tuple[str, ...], model: str | None, system: str | None, stats: bool, **options: Any) -> None:
    """Chat with the exported model in the folder MODEL, which needs a chat template.

    Each line of standard input is a message, or a command: /help lists them. Ctrl-C stops an answer; Ctrl-D or /exit
    ends the chat.
    """
    (folder,) = take_words(words, 0, MODEL=model)
    opening, generation = _take_answer_options(options)
    with _open_model(Path(folder), opening) as opened:
        _Conversation(opened, system, generation, stats).run()


def _take_answer_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the values of `_answer_options`. Returns keywords of `TopWModel.from_pretrained` and of `generate`."""
    own = {name: options.pop(name) for name in ("prefill_chunk", "draft_model")}
    opening = {**take_opening(options), **own, "max_length": options.pop("max_context")}
    greedy = options.pop("greedy")
    generation = take_constraint(options) | take_given(options, [name for name in OPTION_PARAMETERS if name in options])
    if "logit_bias" in generation:
        generation["logit_bias"] = _parse_biases(generation["logit_bias"])
    if greedy and "temperature" in generation:
        raise click.UsageError("give --greedy or --temperature, not both.")
    others = [name for name in RULE_PARAMETER_NAMES if name in generation and generation[name] != TOP_W.name]
    idle = [name for name in _TOP_W_PARAMETERS if name in generation]
    if others and idle:
        raise click.UsageError(
            f"{flag_of(idle[0])} is a parameter of Top-W, but {flag_of(others[0])} chooses another rule; give one of "
            "the two."
        )
    return opening, generation | ({"temperature": 0.0} if greedy else {})


def _open_model(folder: Path, opening: dict[str, Any]) -> TopWModel:
    from topw_deploy.runtime import TopWModel  # late, for a fast `topw generate --help`

    with waiting(f"Opening {folder}"):
        return TopWModel.from_pretrained(folder, **opening)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt, from the argument, the file and stdin: text that is piped to stdin comes before the argument.

    One line break at the end of a file and of stdin is dropped. Raises UsageError for two prompts and for none,
    PromptError for an unreadable file.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --file, not both.")
    if prompt_file is not None:
        return _read_text(prompt_file)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        raise click.UsageError("give PROMPT, --file, or text on standard input.")
    if prompt in (None, "-"):
        return _read_text(Path("-"))
    piped = _read_text(Path("-")) if _is_piped() else ""
    return f"{piped}\n{prompt}" if piped else str(prompt)


def _read_text(path: Path) -> str:
    data, where = read_source(path)
    return decode_text(data, where).removesuffix("\n").removesuffix("\r")


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file, which end, and not a terminal, a socket or a device."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:  # a stream in memory
        return sys.stdin.readable()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _parse_biases(items: tuple[str, ...]) -> dict[int, float]:
    """Token id -> bias, from texts such as "77=2.5"."""
    biases: dict[int, float] = {}
    for item in items:
        token, _, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{item!r} is not TOKEN_ID=NUMBER.", param_hint="--logit-bias") from None
    return biases


def _show_text(pieces: Iterator[Piece], sequences: int, prompt: str = "") -> list[GenerationResult]:
    """Print texts as they are generated. Texts of later sequences wait until the sequence before them has ended.

    sequences: number of sequences. Several are announced on stderr.
    prompt: text to print before each.
    """
    results: dict[int, GenerationResult] = {}
    held: dict[int, str] = {}
    shown = 0  # the sequence that is being printed

    def begin() -> None:
        if sequences > 1:
            tell(f"--- text {shown + 1} of {sequences}")
        write_generated(prompt, dim=True)

    with waiting("Reading the prompt"):
        first = next(pieces, None)
    begin()
    for piece in chain(() if first is None else (first,), pieces):
        held[piece.row] = held.get(piece.row, "") + piece.text
        if piece.result is not None:
            results[piece.row] = piece.result
        while True:
            write_generated(held.pop(shown, ""))
            if shown not in results:
                break
            write("\n")
            shown += 1
            if shown < sequences:
                begin()
    return [results[row] for row in sorted(results)]


def _show_json_lines(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print a JSON object per sequence."""
    results = {piece.row: piece.result for piece in pieces if piece.result is not None}
    for row in sorted(results):
        say_json(results[row].as_dict())
    return [results[row] for row in sorted(results)]


def _report_stats(results: list[GenerationResult]) -> None:
    from topw_deploy.runtime.rule_settings import rule_title

    for result in results:
        times = result.timings
        speed = f"{1 / times.seconds_per_token:.1f} tokens/s" if times.seconds_per_token else "one token"
        kept = f"kept median {statistics.median(result.kept):g}, max {max(result.kept)}" if result.kept else "no tokens"
        drafted, accepted = result.drafted_tokens, result.accepted_tokens
        drafts = f"; {accepted} of {drafted} drafted tokens accepted" if drafted else ""
        mass = f", mass mean {statistics.fmean(result.mass):.3f}" if result.mass else ""
        tell(
            f"{result.prompt_tokens} + {len(result.token_ids)} tokens, {speed}; load {times.load_seconds:.2f} s, "
            f"prefill {times.prefill_seconds * 1e3:.0f} ms, {times.seconds_per_token * 1e3:.2f} ms/token; "
            f"{rule_title(result.rule)}, certified {result.certified_share:.1%}, {kept}{mass}; "
            f"{result.sampler} sampler, seed {result.seed}, {result.finish_reason}{drafts}"
        )


_COMMANDS = {
    "/clear": "start a new chat",
    "/again": "answer the last message again",
    "/system TEXT": "start a new chat with this system message",
    "/set NAME VALUE": "set a parameter, such as temperature 1.5; without VALUE, back to the default",
    "/help": "show this list",
    "/exit": "end the chat; so does Ctrl-D",
}


class _Conversation:
    """A chat with a person or over a pipe.

    messages: the chat so far, without the system message.
    """

    def __init__(self, model: TopWModel, system: str | None, generation: dict[str, Any], stats: bool) -> None:
        self._model, self._system, self._stats = model, system, stats
        self._generation = generation
        self._is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Answer the lines of stdin until it ends. Raises TokenizerError for a model without a chat template."""
        self._model.apply_chat_template(user_messages(self._system, "Hello"))
        if self._is_terminal:
            tell("Type a message, or /help.")
        while (line := self._next_line()) is not None:
            command, _, rest = line.partition(" ")
            if command in ("/exit", "/quit", "/bye"):
                return
            try:
                if line.startswith("/"):
                    self._obey(command, rest.strip())
                elif line:
                    self._answer(line, self.messages)
            except (ParameterError, PromptError) as error:
                tell(f"{error} (/clear starts a new chat)" if isinstance(error, PromptError) else str(error))

    def _next_line(self) -> str | None:
        """The next line of stdin, without its line break; None at its end."""
        if self._is_terminal and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # the arrow keys edit the line and recall earlier ones
            try:
                return input("> ")
            except KeyboardInterrupt:
                tell("", "(Ctrl-D or /exit ends the chat)")
                return ""
            except EOFError:
                tell("")
                return None
        if sys.stdin is None:
            raise click.UsageError("standard input is closed; a chat reads its messages there.")
        if self._is_terminal:
            tell("> ", end="")
        line = sys.stdin.buffer.readline()
        return decode_text(line, "standard input").rstrip("\r\n") if line else None

    def _obey(self, command: str, rest: str) -> None:
        if command == "/clear":
            self.messages.clear()
        elif command == "/again" and len(self.messages) > 1:
            self._answer(self.messages[-2]["content"], self.messages[:-2])
        elif command == "/system":
            self._system = rest or None
            self.messages.clear()
        elif command == "/set" and rest:
            name, value = _named_value(rest)
            self._generation.pop(name, None)
            self._generation |= {} if value is None else {name: value}
        else:
            if command == "/again":
                tell("There is no answer to repeat.")
            elif command not in ("/help", "/set"):
                tell(f"{command} is no command; put a space before a message that begins with a slash.")
            width = max(map(len, _COMMANDS))
            tell(*(f"{each.ljust(width)}  {text}" for each, text in _COMMANDS.items()))

    def _answer(self, text: str, before: list[dict[str, str]]) -> None:
        """Print the answer to a message after the messages `before`. On a terminal, Ctrl-C stops it."""
        parts: list[str] = []

        def noted(pieces: Iterator[Piece]) -> Iterator[Piece]:
            for piece in pieces:
                parts.append(piece.text)
                yield piece

        messages = [*before, {"role": "user", "content": text}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        pieces = self._model.stream_chat([*system, *messages], **self._generation)
        try:
            results = _show_text(noted(pieces), 1)
            if self._stats:
                _report_stats(results)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            tell("", "(stopped)")
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def _named_value(text: str) -> tuple[str, Any]:
    """A parameter and its value from "NAME VALUE"; the value is None if there is none. Raises ParameterError."""
    from topw_deploy.runtime.parameters import ALIASES
    from topw_deploy.runtime.rule_settings import parse_value

    name, _, value = text.replace("=", " ", 1).partition(" ")
    name = name.lstrip("-").replace("-", "_")
    name = next((ours for ours, flags in SHORT_FLAGS.items() if name in (flag.strip("-") for flag in flags)), name)
    name = ALIASES.get(name, name)
    if name not in _CHAT_PARAMETERS:
        raise unknown_name(name, _CHAT_PARAMETERS)
    return name, parse_value(name, value.strip()) if value.strip() else None
