"""`topw generate --prompts-jsonl`: answer many prompts, as JSON lines or in a benchmark's format."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import click
import msgspec

from topw_deploy.cli.options import COUNT, PATH_OR_STREAM, flag_of, option_group
from topw_deploy.cli.prompts import PromptLine, read_prompt_lines
from topw_deploy.cli.terminal import bar, check_output, read_source, tell
from topw_deploy.errors import LogitsError, ParameterError, PromptError, TokenizerError, TopWError
from topw_deploy.folders import atomic_file
from topw_deploy.text import count_text, json_text

if TYPE_CHECKING:
    from topw_deploy.runtime import GenerationResult, TopWModel

    OpenModel = Callable[[], TopWModel]

_START = b'{"index": '  # first bytes of every line

prompt_file_options = option_group(
    click.option(
        "--prompts-jsonl", type=PATH_OR_STREAM, help="Run every prompt of a file of JSON lines; - is standard input."
    ),
    click.option(
        "--output", type=PATH_OR_STREAM, help="With --prompts-jsonl: file for the answers.  [default: standard output]"
    ),
    click.option("--batch-size", type=COUNT, help="With --prompts-jsonl: prompts per batch.  [default: 1]"),
    click.option(
        "--resume", is_flag=True, help="Continue after the answers that an interrupted run wrote to --output."
    ),
    click.option("--overwrite", "--force", is_flag=True, help="Replace the answers in --output."),
    click.option(
        "--format",
        "layout",
        type=click.Choice(("alpaca_eval", "mt_bench")),
        help="With --prompts-jsonl: read this benchmark's questions, and write --output in its format.",
    ),
    click.option("--model-id", metavar="NAME", help="With --format: name of the model in --output.  [default: MODEL]"),
)
"""--prompts-jsonl and the options that need it; `take_prompt_files` takes their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of `topw generate --prompts-jsonl`.

    source: the prompts; - is stdin.
    output: the answers; None is stdout.
    resume: whether a run that was interrupted continues.
    overwrite: whether an existing `output` is replaced.
    layout: the benchmark that the files belong to, one of `topw_lab.judges.FORMATS`; None for JSON lines.
    model_id: name of the model in a benchmark's `output`; None for the folder's name.
    batch_size: maximum number of prompts per batch; None for 1.
    parameters: parameters of `TopWModel.generate`. The parameters in the line of a prompt override them.
    chat, system: whether the chat template is used, and its system message.
    max_context: maximum number of tokens of prompt and answer together; None for the model's context.
    stats: whether speed and certified share are printed to stderr.
    """

    source: Path
    output: Path | None
    resume: bool
    overwrite: bool
    layout: str | None
    model_id: str | None
    batch_size: int | None
    parameters: Mapping[str, Any]
    chat: bool
    system: str | None
    max_context: int | None
    stats: bool


def take_prompt_files(options: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the values of `prompt_file_options` from `options`. Returns them as fields of `Run`.

    Returns None without --prompts-jsonl. Raises UsageError for options that cannot be combined.
    """
    names = ("output", "batch_size", "resume", "overwrite", "layout", "model_id")
    files = {"source": options.pop("prompts_jsonl"), **{name: options.pop(name) for name in names}}
    if files["source"] is None:
        for name in names:
            if files[name]:
                raise click.UsageError(f"{flag_of(name).replace('layout', 'format')} needs --prompts-jsonl.")
        return None
    if str(files["output"]) == "-":
        files["output"] = None
    source, output = files["source"], files["output"]
    if files["resume"] and files["overwrite"]:
        raise click.UsageError("give --resume or --overwrite, not both.")
    if output is None and (files["resume"] or files["overwrite"]):
        raise click.UsageError("--resume and --overwrite need --output with a file.")
    if output is not None and output.exists() and source.exists() and output.samefile(source):
        raise click.UsageError("--output is the same file as --prompts-jsonl; give another file.")
    if files["layout"] is None and files["model_id"] is not None:
        raise click.UsageError("--model-id needs --format.")
    if files["layout"] is not None and output is None:
        raise click.UsageError("--format needs --output with a file.")
    return files


def answer_file(open_model: OpenModel, run: Run) -> None:
    """Answer all prompts or questions of a file, in order.

    open_model: opens the model, after the file was checked.

    Raises PromptError at the end if any prompt failed.
    """
    if run.output is not None:
        check_answers(run.output, resume=run.resume, overwrite=run.overwrite)
    data, where = read_source(run.source)
    if run.layout is not None and run.output is not None:
        _answer_questions(open_model, run, run.output, run.layout, data, where)
        return
    prompts = _read_prompts(data, where, run)
    with open_model() as model:
        _answer_prompts(model, prompts, run.output, run)


def _read_prompts(data: bytes, where: str, run: Run) -> list[PromptLine]:
    parameters = {name: value for name, value in run.parameters.items() if name != "seed"}
    return read_prompt_lines(data, where, parameters, chat=run.chat, system=run.system)


def _answer_questions(open_model: OpenModel, run: Run, output: Path, layout: str, data: bytes, where: str) -> None:
    """Answer all questions turn by turn, each turn to a file of JSON lines. Then write `output`."""
    from topw_lab.judges import judged_text, read_questions, read_texts, turn_prompts

    if run.parameters.get("num_return_sequences", 1) != 1:
        raise click.UsageError("--format needs one answer per question; omit --num-return-sequences.")
    questions = read_questions(data, where, layout)
    turns = max(len(question.turns) for question in questions)
    if turns > 1 and not run.chat:
        raise click.UsageError(
            f"questions of {where} have up to {turns} turns, which need the earlier answers; give --chat."
        )
    answers: list[dict[str | int, str]] = []
    with open_model() as model:
        for turn in range(turns):
            lines = map(json.dumps, turn_prompts(questions, answers, run.system))
            prompts = _read_prompts("\n".join(lines).encode(), where, run)
            path = output.with_name(f"{output.name}.turn-{turn + 1}.jsonl")
            check_answers(path, resume=run.resume, overwrite=run.overwrite)
            seed = _answer_prompts(model, prompts, path, run)
            run = replace(run, parameters={**run.parameters, "seed": seed})  # the same for all turns
            answers.append(read_texts(path))
        name = run.model_id or model.path.resolve().name
    with atomic_file(output) as stream:
        stream.write(judged_text(layout, questions, answers, name, run.source.stem).encode())


def _answer_prompts(model: TopWModel, prompts: Sequence[PromptLine], path: Path | None, run: Run) -> int:
    """Write a line per sequence to `path`. Returns the run's seed, from which each prompt's seed is derived.

    Raises TokenizerError if a prompt needs a chat template that the model lacks, and PromptError at the end if any
    prompt failed. Failures of the machine, such as too little memory, end the run.
    """
    from topw_deploy.manifest import MANIFEST_NAME, sha256_of

    lines = [_with_encoded_prompt(model, line) for line in prompts]
    head: dict[str, Any] = {"model": sha256_of(model.path / MANIFEST_NAME)[:32]}
    digests = [line.digest({"max_context": run.max_context}) for line in prompts]
    finished = Finished()
    if run.resume and path is not None:
        finished = read_finished(path, digests, [line.samples for line in prompts], head["model"])
    head["run_seed"] = seed = _run_seed(run.parameters.get("seed"), finished.run_seed, path)
    total, failed, counts = count_text(len(prompts), "prompt"), finished.failed, Counter[str]()
    if finished.prompts:
        tell(f"{finished.prompts} of {total} are already in {path}; continuing after them.")
    started = time.perf_counter()
    with answer_stream(path, finished.size) as stream, bar(len(prompts), "prompts", done=finished.prompts) as advance:
        for batch in _batches(lines[finished.prompts :], run.batch_size or 1):
            for line, answers in zip(batch, _answers(model, batch, seed), strict=True):
                own = {"index": line.index, "id": line.id, "request": digests[line.index], **head}
                if isinstance(answers, TopWError):
                    failed += 1
                    stream.write(line_bytes({**own, "error": str(answers), "error_type": type(answers).__name__}))
                    continue
                for result in answers:
                    stream.write(line_bytes({**own, **result.as_dict()}))
                    counts.update(sequences=1, tokens=len(result.token_ids), certified=sum(result.certified))
            stream.flush()
            advance(len(batch))
    if run.stats:
        share = f"; certified {counts['certified'] / counts['tokens']:.1%}" if counts["tokens"] else ""
        amounts = f"{count_text(counts['sequences'], 'sequence')}, {count_text(counts['tokens'], 'token')}"
        tell(f"{amounts} in {time.perf_counter() - started:.1f} s{share}; {model.sampler} sampler, run seed {seed}")
    if failed:
        place = "standard output" if path is None else path
        raise PromptError(f"{failed} of {total} failed; their lines in {place} hold the error.")
    return seed


def _run_seed(given: int | None, earlier: int | None, path: Path | None) -> int:
    """The seed of a run: `given`, or that of an interrupted run, or a new one. Raises ParameterError if they differ."""
    from topw_deploy.runtime.parameters import PARAMETERS
    from topw_deploy.sampling.seeds import fresh_seed

    if given is not None:
        given = int(PARAMETERS["seed"].read("seed", given))
    if None not in (given, earlier) and given != earlier:
        raise ParameterError(
            f"{path} was made with seed {earlier}, but seed is {given}; give the same seed or none, or start again "
            "with --overwrite."
        )
    known = earlier if given is None else given
    return fresh_seed() if known is None else known


def _with_encoded_prompt(model: TopWModel, line: PromptLine) -> PromptLine:
    """The line with text or token ids as prompt, or with the error of a chat template that refuses the messages.

    Raises TokenizerError, naming the line, if the model has no template.
    """
    if line.kind != "messages":
        return line
    try:
        text = model.apply_chat_template(line.prompt)
        return replace(line, prompt=model.tokenizer.encode(text, add_special_tokens=False))
    except TokenizerError as error:
        raise TokenizerError(f"{line.where}: {error}") from None
    except PromptError as error:
        return replace(line, prompt=error)


def _batch_wide_parameters(line: PromptLine) -> dict[str, Any]:
    """The parameters of a line that must be the same for all prompts of a batch."""
    from topw_deploy.runtime.parameters import PARAMETERS

    return {name: value for name, value in line.parameters.items() if not PARAMETERS[name].per_prompt}


def _batches(prompts: Sequence[PromptLine], size: int) -> Iterator[list[PromptLine]]:
    """Yield batches of up to `size` consecutive prompts that have the same batch-wide parameters."""
    batch: list[PromptLine] = []
    for line in prompts:
        if batch and (len(batch) == size or _batch_wide_parameters(batch[0]) != _batch_wide_parameters(line)):
            yield batch
            batch = []
        batch.append(line)
    if batch:
        yield batch


def _answers(model: TopWModel, batch: Sequence[PromptLine], seed: int) -> list[list[GenerationResult] | TopWError]:
    """The results of each prompt of a batch, or the error of a prompt that cannot be run."""
    from topw_deploy.sampling.seeds import prompt_seed

    columns = [{"seed": prompt_seed(seed, line.index), **line.parameters} for line in batch]
    shared = _batch_wide_parameters(batch[0])
    names = dict.fromkeys(name for column in columns for name in column if name not in shared)
    parameters: dict[str, Any] = {name: [column.get(name) for column in columns] for name in names} | shared
    try:
        for line in batch:
            if isinstance(line.prompt, TopWError):
                raise line.prompt
        results = iter(model.generate([line.prompt for line in batch], **parameters))
    except (PromptError, ParameterError, LogitsError) as error:  # caused by a prompt, not by the machine
        if len(batch) == 1:
            return [error]
        return [answer for line in batch for answer in _answers(model, [line], seed)]  # to find which prompt fails
    return [list(islice(results, line.samples)) for line in batch]


@dataclass(frozen=True, slots=True)
class Finished:
    """What an interrupted run finished.

    prompts: number of finished prompts.
    failed: number of finished prompts that have an error instead of answers.
    size: bytes of the lines of finished prompts.
    run_seed: seed of the run; None if no prompt is finished.
    """

    prompts: int = 0
    failed: int = 0
    size: int = 0
    run_seed: int | None = None


class _Answer(msgspec.Struct):
    """The fields of an answer's line that a resumed run compares. error: None without a failure."""

    index: int
    request: str
    model: str
    run_seed: Annotated[int, msgspec.Meta(ge=0)]
    error: str | None = None


def check_answers(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ParameterError if answers must not be written to `path`."""
    check_output(path, "output")
    if path.exists() and not path.is_file():
        raise ParameterError(f"{path} is not a regular file; omit --output to write to standard output.")
    if path.exists() and not (resume or overwrite):
        raise ParameterError(f"{path} exists; continue it with --resume, or replace it with --overwrite.")


def read_finished(path: Path, requests: Sequence[str], samples: Sequence[int], model: str) -> Finished:
    """Read what an interrupted run finished. Incomplete lines and prompts are ignored.

    requests: digest of each prompt's request.
    samples: number of sequences of each request.
    model: digest of the model.

    Raises ParameterError if the file comes from other input, parameters or another model, or has another format.
    """
    if not path.exists():
        return Finished()
    finished, size, sequences = Finished(), 0, 0  # `sequences`: those of the prompt that is being read
    *lines, unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        place, index = f"line {number} of {path}", finished.prompts
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except (ValueError, RecursionError):
            raise ParameterError(f"{place} was not written by this command; choose another --output.") from None
        if answer.model != model:
            raise ParameterError(f"{place} was made with another model; use that one, or start again with --overwrite.")
        of_prompt = requests[index : index + 1] == [answer.request] and answer.index == index
        if not of_prompt or finished.run_seed not in (None, answer.run_seed):
            raise ParameterError(
                f"{place} answers another prompt, or one with another seed or other parameters; give "
                "the same input and options as before, or start again with --overwrite."
            )
        size += len(line) + 1
        sequences += 1
        failed = answer.error is not None
        if failed or sequences == samples[index]:
            finished, sequences = Finished(index + 1, finished.failed + failed, size, answer.run_seed), 0
    if not unfinished.startswith(_START[: len(unfinished)]):
        raise ParameterError(f"the end of {path} was not written by this command; choose another --output.")
    return finished


@contextmanager
def answer_stream(path: Path | None, size: int) -> Iterator[BinaryIO]:
    """Yield a stream that appends to the first `size` bytes of a file; None is stdout.

    If the block is interrupted or fails, print how to continue.
    """
    if path is None:
        yield sys.stdout.buffer
        return
    with path.open("r+b" if path.exists() else "xb") as stream:
        stream.truncate(size)
        stream.seek(size)
        try:
            yield stream
        except (KeyboardInterrupt, TopWError):
            tell(f"Finished answers are in {path}; run the same command with --resume to continue.")
            raise


def line_bytes(fields: Mapping[str, Any]) -> bytes:
    """A line of answers, whose first field must be "index"."""
    return (json_text(fields) + "\n").encode()
