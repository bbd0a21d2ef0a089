"""`topw generate`: continue a prompt or chat. Only generated text or JSON lines go to stdout."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from topw_deploy.cli.batch import Run, answer_file, prompt_file_options, take_prompt_files
from topw_deploy.cli.options import (
    CONTEXT,
    COUNT,
    OPTION_PARAMETERS,
    PATH,
    constraint_options,
    opening_options,
    parameter_options,
    take_constraint,
    take_given,
    take_opening,
)
from topw_deploy.cli.prompts import user_messages
from topw_deploy.cli.terminal import GeneratedText, read_source, say_json, tell
from topw_deploy.errors import PromptError
from topw_deploy.text import decode_text

if TYPE_CHECKING:
    from topw_deploy.runtime import GenerationResult, Piece, TopWModel

    Show: TypeAlias = Callable[[Iterator[Piece]], list[GenerationResult]]


@click.command(name="generate", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=PATH)
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=PATH, help="Read the prompt from a file (UTF-8).")
@prompt_file_options
@click.option("--chat", is_flag=True, help="Use the chat template: answer PROMPT, or start a conversation without one.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sequence, each on a line.")
@click.option("--stats", is_flag=True, help="Print speed, kept tokens and the certified share to stderr.")
@click.option("--stream/--no-stream", default=True, help="Print text as it is generated, or at the end.")
@parameter_options(*OPTION_PARAMETERS)
@constraint_options
@click.option(
    "--max-context",
    type=COUNT,
    help="Maximum number of tokens of prompt and answer together; also sizes the cache. Default: the model's context.",
)
@click.option("--prefill-chunk", type=COUNT, help="Maximum number of prompt tokens per run; fewer save memory.")
@opening_options
def generate(
    folder: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    stats: bool,
    stream: bool,
    **parameters: Any,
) -> None:
    """Continue PROMPT with the exported model in the folder OUT.

    PROMPT may be - for standard input, which is also read when it is not a terminal and no prompt is given. One line
    break at the end of a file or of standard input is ignored.

    With --prompts-jsonl, each line of the file is a JSON string, or an object with "prompt", "prompt_ids" or
    "messages", an "id" and parameters for this prompt. One JSON object per sequence is written, in the order of the
    prompts. A prompt that fails gets a line with "error", and the exit code is then 1.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    files = take_prompt_files(parameters)
    if files is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("give only one of PROMPT, --prompt-file and --prompts-jsonl.")
    text = _read_prompt(prompt, prompt_file, optional=chat) if files is None else None
    max_context, prefill_chunk = parameters.pop("max_context"), parameters.pop("prefill_chunk")
    opening = {**take_opening(parameters), "max_length": max_context, "prefill_chunk": prefill_chunk}
    generation = take_constraint(parameters) | take_given(parameters, OPTION_PARAMETERS)
    if "logit_bias" in generation:
        generation["logit_bias"] = _parse_biases(generation["logit_bias"])
    if "logprobs" in generation and not (as_json or files is not None):
        raise click.UsageError("--logprobs needs --json, which shows them.")

    def open_model() -> TopWModel:
        from topw_deploy.runtime import TopWModel  # late, for a fast `topw generate --help`

        return TopWModel.from_pretrained(folder, **opening)

    if files is not None:
        answer_file(
            open_model,
            Run(**files, parameters=generation, chat=chat, system=system, max_context=max_context, stats=stats),
        )
        return
    with open_model() as model:
        show: Show = _show_json_lines if as_json else _show_streamed if stream else _show_at_end
        if not chat:
            results = show(model.stream(text, **generation))
        elif text is not None:
            results = show(model.stream_chat(user_messages(system, text), **generation))
        else:
            _converse(model, system, generation, show, stats)
            return
        if stats:
            _report_stats(results)


def _read_prompt(prompt: str | None, prompt_file: Path | None, *, optional: bool) -> str | None:
    """The prompt, from the argument, the file or stdin; None if it is optional and not given.

    One line break at its end is dropped, unless it is the argument. Raises UsageError for two prompts and, unless
    `optional`, for none, PromptError for an unreadable file.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompt-file, not both.")
    if prompt not in (None, "-"):
        return prompt
    if prompt is None and prompt_file is None and sys.stdin is not None:
        if optional:
            return None
        if sys.stdin.isatty():
            raise click.UsageError("give PROMPT, --prompt-file, or text on standard input.")
    data, where = read_source(prompt_file or Path("-"))
    return decode_text(data, where).removesuffix("\n").removesuffix("\r")


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


def _show_streamed(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print texts as they are generated. Texts of later sequences wait until the sequence before them has ended."""
    results: dict[int, GenerationResult] = {}
    waiting: dict[int, str] = {}
    printed = 0  # the sequence that is being printed
    text = GeneratedText()
    for piece in pieces:
        waiting[piece.row] = waiting.get(piece.row, "") + piece.text
        if piece.result is not None:
            results[piece.row] = piece.result
        while True:
            text.add(waiting.pop(printed, ""))
            if printed not in results:
                break
            text.end()
            printed += 1
    return [results[row] for row in sorted(results)]


def _show_at_end(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print all texts when they are complete."""
    return _show_streamed(iter(list(pieces)))


def _show_json_lines(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print a JSON object per sequence."""
    results = {piece.row: piece.result for piece in pieces if piece.result is not None}
    for row in sorted(results):
        say_json(results[row].as_dict())
    return [results[row] for row in sorted(results)]


def _report_stats(results: list[GenerationResult]) -> None:
    for result in results:
        times = result.timings
        speed = f"{1 / times.seconds_per_token:.1f} tokens/s" if times.seconds_per_token else "one token"
        kept = f"kept median {statistics.median(result.kept):g}, max {max(result.kept)}" if result.kept else "no tokens"
        mass = f", mass mean {statistics.fmean(result.mass):.3f}" if result.mass else ""
        tell(
            f"{result.prompt_tokens} + {len(result.token_ids)} tokens, {speed}; load {times.load_seconds:.2f} s, "
            f"prefill {times.prefill_seconds * 1e3:.0f} ms, {times.seconds_per_token * 1e3:.2f} ms/token; "
            f"rule {result.rule}, certified {result.certified_share:.1%}, {kept}{mass}; "
            f"{result.sampler} sampler, seed {result.seed}, {result.finish_reason}"
        )


def _converse(model: TopWModel, system: str | None, generation: dict[str, Any], show: Show, stats: bool) -> None:
    """Chat until stdin ends. The line /clear starts a new chat."""
    history: list[dict[str, str]] = []
    model.apply_chat_template(user_messages(system, "Hello"))  # refuses a model without a template
    if sys.stdin.isatty():
        tell("Ctrl-D ends the chat, /clear starts a new one.")
    while True:
        if sys.stdin.isatty():
            tell("> ", end="")
        line = sys.stdin.buffer.readline()
        if not line:
            return
        text = decode_text(line, "standard input").rstrip("\r\n")
        if text == "/clear":
            history.clear()
        elif text:
            messages = [*history, *user_messages(system if not history else None, text)]
            try:
                results = show(model.stream_chat(messages, **generation))
            except PromptError as error:
                tell(f"{error} (/clear starts a new chat)")
                continue
            if stats:
                _report_stats(results)
            history = [*messages, {"role": "assistant", "content": results[0].text}]
