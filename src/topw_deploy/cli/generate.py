"""`topw generate`: continue a prompt or chat. Only generated text or JSON lines go to stdout."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from topw_deploy.cli.batch import RunOptions, answer_file, prompt_file_options, take_prompt_files
from topw_deploy.cli.options import (
    CONTEXT,
    OPTION_PARAMETERS,
    constraint_options,
    opening_options,
    parameter_options,
    require_folder_first,
    take_constraint,
    take_opening,
)
from topw_deploy.cli.prompts import user_messages
from topw_deploy.cli.terminal import GeneratedText, say_json, tell
from topw_deploy.errors import PromptError
from topw_deploy.text import decode_text

if TYPE_CHECKING:
    from topw_deploy.runtime import GenerationResult, Piece, TopWModel

    Show: TypeAlias = Callable[[Iterator[Piece]], list[GenerationResult]]


@click.command(name="generate", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a file (UTF-8).")
@prompt_file_options
@click.option("--chat", is_flag=True, help="Use the chat template: answer PROMPT, or start a conversation without one.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sequence, each on a line.")
@click.option("--stats", is_flag=True, help="Print speed, kept tokens and the certified share to stderr.")
@click.option("--stream/--no-stream", default=True, help="Print text as it is generated (default) or at the end.")
@parameter_options(*OPTION_PARAMETERS)
@constraint_options
@click.option(
    "--max-context",
    type=click.IntRange(min=1),
    help="Maximum number of tokens of prompt and answer together; also sizes the cache. Default: the model's context.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    help="Maximum number of prompt tokens per run; fewer save memory.",
)
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
    require_folder_first(folder, filter(None, [prompt]))
    files, batch_size = take_prompt_files(parameters), parameters.pop("batch_size")
    if files is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("give only one of PROMPT, --prompt-file and --prompts-jsonl.")
    text = _read_prompt(prompt, prompt_file, optional=chat) if files is None else None
    model_options = {
        **take_opening(parameters),
        "max_length": parameters.pop("max_context"),
        "prefill_chunk": parameters.pop("prefill_chunk"),
    }
    generation = take_constraint(parameters) | _given_parameters(parameters)
    if "logprobs" in generation and not (as_json or files is not None):
        raise click.UsageError("--logprobs needs --json, which shows them.")
    if files is not None:
        options = RunOptions(
            parameters=generation,
            chat=chat,
            system=system,
            batch_size=batch_size or 1,
            max_context=model_options["max_length"],
        )
        answer_file(lambda: _open_model(folder, model_options), files, options, stats=stats)
        return
    with _open_model(folder, model_options) as model:
        show: Show = _show_json_lines if as_json else _show_streamed if stream else _show_texts
        if not chat:
            results = show(model.stream(text, **generation))
        elif text is not None:
            results = show(model.stream_chat(user_messages(system, text), **generation))
        else:
            _converse(model, system, generation, show, stats)
            return
        if stats:
            _report_stats(results)


def _open_model(folder: Path, model_options: dict[str, Any]) -> TopWModel:
    # Import late, for a fast `topw generate --help`.
    from topw_deploy.runtime import TopWModel

    return TopWModel.from_pretrained(folder, **model_options)


def _read_prompt(prompt: str | None, prompt_file: Path | None, *, optional: bool) -> str | None:
    """The prompt, from the argument, the file or stdin; None if it is optional and not given.

    Raises UsageError for two prompts and, unless `optional`, for none, PromptError for an unreadable file.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompt-file, not both.")
    if prompt_file is not None:
        try:
            return _decode_prompt(prompt_file.read_bytes(), str(prompt_file))
        except OSError as error:
            raise PromptError(f"{prompt_file} cannot be read: {error.strerror or error}.") from None
    has_input = sys.stdin is not None  # sys.stdin is None if it is closed
    if has_input and (prompt == "-" or (prompt is None and not optional and not sys.stdin.isatty())):
        return _decode_prompt(sys.stdin.buffer.read(), "standard input")
    if prompt == "-" or (not has_input and prompt is None):
        raise click.UsageError("standard input is closed; give PROMPT or --prompt-file.")
    if prompt is None and not optional:
        raise click.UsageError("give PROMPT, --prompt-file, or text on standard input.")
    return prompt


def _decode_prompt(data: bytes, where: str) -> str:
    """The text without one line break at the end."""
    return decode_text(data, where).removesuffix("\n").removesuffix("\r")


def _given_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the user set on the command line."""
    generation = {name: value for name, value in parameters.items() if value is not None and value != ()}
    if "logit_bias" in generation:
        generation["logit_bias"] = _parse_biases(generation["logit_bias"])
    return generation


def _parse_biases(items: tuple[str, ...]) -> dict[int, float]:
    """Token id -> bias, from texts such as "77=2.5"."""
    biases: dict[int, float] = {}
    for token, bias in map(_parse_bias, items):
        if token in biases:
            raise click.BadParameter(f"token {token} is given twice; give it one bias.", param_hint="--logit-bias")
        biases[token] = bias
    return biases


def _parse_bias(item: str) -> tuple[int, float]:
    token, _, bias = item.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{item!r} is not TOKEN_ID=NUMBER.", param_hint="--logit-bias") from None


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


def _show_texts(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print all texts when they are complete."""
    results = _finished_results(pieces)
    text = GeneratedText()
    for result in results:
        text.add(result.text)
        text.end()
    return results


def _show_json_lines(pieces: Iterator[Piece]) -> list[GenerationResult]:
    """Print a JSON object per sequence."""
    results = _finished_results(pieces)
    for result in results:
        say_json(result.as_dict())
    return results


def _finished_results(pieces: Iterator[Piece]) -> list[GenerationResult]:
    results = {piece.row: piece.result for piece in pieces if piece.result is not None}
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
