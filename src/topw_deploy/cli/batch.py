"""`topw generate --prompts-jsonl`: answer many prompts, as JSON lines or in a benchmark's format."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from topw_deploy.cli.prompts import PromptLine, read_prompt_lines
from topw_deploy.cli.terminal import click_bar, read_source, tell
from topw_deploy.errors import LogitsError, ParameterError, PromptError, TokenizerError, TopWError
from topw_deploy.folders import atomic_file
from topw_deploy.text import count_text

if TYPE_CHECKING:
    from topw_deploy.runtime import GenerationResult, TopWModel

    OpenModel = Callable[[], TopWModel]


def prompt_file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --prompts-jsonl and the options that need it; `take_prompt_files` takes their values."""
    options = (
        click.option(
            "--prompts-jsonl",
            type=click.Path(path_type=Path, allow_dash=True),
            help="Run every prompt of a file of JSON lines; - is standard input.",
        ),
        click.option(
            "--output",
            type=click.Path(path_type=Path, allow_dash=True),
            help="With --prompts-jsonl: file for the answers.  [default: standard output]",
        ),
        click.option(
            "--batch-size", type=click.IntRange(min=1), help="With --prompts-jsonl: prompts per batch.  [default: 1]"
        ),
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
        click.option(
            "--model-id", metavar="NAME", help="With --format: name of the model in --output.  [default: OUT]"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """Files of prompts and answers.

    source: the prompts; - is stdin.
    output: the answers; None is stdout.
    resume: whether a run that was interrupted continues.
    overwrite: whether an existing `output` is replaced.
    layout: the benchmark that the files belong to, one of `topw_lab.judges.FORMATS`; None for JSON lines.
    model_id: name of the model in a benchmark's `output`; None for the folder's name.
    """

    source: Path
    output: Path | None
    resume: bool
    overwrite: bool
    layout: str | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for all prompts.

    parameters: parameters of `TopWModel.generate`. The parameters in the line of a prompt override them.
    chat, system: whether the chat template is used, and its system message.
    batch_size: maximum number of prompts per batch.
    max_context: maximum number of tokens of prompt and answer together; None for the model's context.
    """

    parameters: Mapping[str, Any]
    chat: bool
    system: str | None
    batch_size: int
    max_context: int | None


def take_prompt_files(options: dict[str, Any]) -> PromptFiles | None:
    """Remove the values of `prompt_file_options` from `options`, except batch_size.

    Returns the files; None without --prompts-jsonl.

    Raises UsageError for options that cannot be combined.
    """
    source, output = options.pop("prompts_jsonl"), options.pop("output")
    resume, overwrite = options.pop("resume"), options.pop("overwrite")
    layout, model_id = options.pop("layout"), options.pop("model_id")
    if source is None:
        dependent_options = {
            "--output": output,
            "--batch-size": options["batch_size"],
            "--resume": resume,
            "--overwrite": overwrite,
            "--format": layout,
            "--model-id": model_id,
        }
        for name, value in dependent_options.items():
            if value:
                raise click.UsageError(f"{name} needs --prompts-jsonl.")
        return None
    if str(output) == "-":
        output = None
    if resume and overwrite:
        raise click.UsageError("give --resume or --overwrite, not both.")
    if output is None and sys.stdout is None:  # closed
        raise click.UsageError("standard output is closed; give --output with a file.")
    if output is None and (resume or overwrite):
        raise click.UsageError("--resume and --overwrite need --output with a file.")
    if output is not None and output.exists() and source.exists() and output.samefile(source):
        raise click.UsageError("--output is the same file as --prompts-jsonl; give another file.")
    if layout is None and model_id is not None:
        raise click.UsageError("--model-id needs --format.")
    if layout is not None and output is None:
        raise click.UsageError("--format needs --output with a file.")
    return PromptFiles(source, output, resume, overwrite, layout, model_id)


def answer_file(open_model: OpenModel, files: PromptFiles, options: RunOptions, *, stats: bool) -> None:
    """Answer all prompts or questions of a file, in order.

    open_model: opens the model, after the file was checked.
    stats: whether speed and certified share are printed to stderr.

    Raises PromptError at the end if any prompt failed.
    """
    if files.output is not None:
        check_answers(files.output, resume=files.resume, overwrite=files.overwrite)
    if files.layout is not None and files.output is not None:
        _answer_questions(open_model, files, files.output, files.layout, options, stats)
        return
    prompts = _read_prompts(*read_source(files.source), options)
    with open_model() as model:
        _answer_prompts(model, prompts, files, options, stats)


def _read_prompts(data: bytes, where: str, options: RunOptions) -> list[PromptLine]:
    parameters = {name: value for name, value in options.parameters.items() if name != "seed"}
    return read_prompt_lines(data, where, parameters, chat=options.chat, system=options.system)


def _answer_prompts(
    model: TopWModel, prompts: Sequence[PromptLine], files: PromptFiles, options: RunOptions, stats: bool
) -> int:
    """Write a line per sequence to `files.output`. Returns the run's seed."""
    path = files.output
    run = _AnswerRun(model, prompts, options)
    finished = run.resume(path) if files.resume and path is not None else Finished()
    if finished.prompts:
        tell(
            f"{finished.prompts} of {count_text(len(prompts), 'prompt')} are already in {path}; continuing after them."
        )
    started = time.perf_counter()
    with (
        AnswerFile(path, finished.size) as answers,
        _resume_hint(path),
        click_bar("prompts", len(prompts), done=finished.prompts, show_pos=True) as advance,
    ):
        for batch in _batches(prompts[finished.prompts :], options.batch_size):
            answers.add(run.answers(batch))
            advance(len(batch))
    if stats:
        run.report(time.perf_counter() - started)
    failed = finished.failed + run.failed
    if failed:
        place = "standard output" if path is None else path
        raise PromptError(
            f"{failed} of {count_text(len(prompts), 'prompt')} failed; their lines in {place} hold the error."
        )
    return run.run_seed


def _answer_questions(
    open_model: OpenModel, files: PromptFiles, output: Path, layout: str, options: RunOptions, stats: bool
) -> None:
    """Answer all questions turn by turn, each turn to a file of JSON lines. Then write `output`."""
    from topw_lab.judges import judged_text, read_questions, read_texts, turn_prompts

    if options.parameters.get("num_return_sequences", 1) != 1:
        raise click.UsageError("--format needs one answer per question; omit --num-return-sequences.")
    data, where = read_source(files.source)
    questions = read_questions(data, where, layout)
    turns = max(len(question.turns) for question in questions)
    if turns > 1 and not options.chat:
        raise click.UsageError(
            f"questions of {where} have up to {turns} turns, which need the earlier answers; give --chat."
        )
    answers: list[dict[str | int, str]] = []
    with open_model() as model:
        for turn in range(turns):
            lines = map(json.dumps, turn_prompts(questions, answers, options.system))
            prompts = _read_prompts("\n".join(lines).encode(), where, options)
            path = output.with_name(f"{output.name}.turn-{turn + 1}.jsonl")
            check_answers(path, resume=files.resume, overwrite=files.overwrite)
            seed = _answer_prompts(model, prompts, replace(files, output=path), options, stats)
            options = replace(options, parameters={**options.parameters, "seed": seed})  # the same for all turns
            answers.append(read_texts(path, [question for question in questions if len(question.turns) > turn]))
        name = files.model_id or model.path.resolve().name
    with atomic_file(output) as stream:
        stream.write(judged_text(layout, questions, answers, name, files.source.stem).encode())


class _AnswerRun:
    """Answers the prompts of a file with one model.

    run_seed: seed of the run, from which each prompt's seed is derived.
    failed: number of prompts that failed so far.

    Raises TokenizerError if a prompt needs a chat template that the model lacks.
    """

    def __init__(self, model: TopWModel, prompts: Sequence[PromptLine], options: RunOptions) -> None:
        from topw_deploy.manifest import MANIFEST_NAME, sha256_of
        from topw_deploy.runtime.parameters import PARAMETERS
        from topw_deploy.sampling.seeds import fresh_seed

        self._model, self._prompts = model, prompts
        self._encoded = [_encode_prompt(model, line) for line in prompts]
        self._model_digest = sha256_of(model.path / MANIFEST_NAME)[:32]
        self._digests = [line.digest({"max_context": options.max_context}) for line in prompts]
        seed = options.parameters.get("seed")
        self._given_seed = None if seed is None else PARAMETERS["seed"].read("seed", seed)
        self.run_seed = fresh_seed() if self._given_seed is None else self._given_seed
        self.failed = 0
        self._sequences = self._tokens = self._certified = 0

    def resume(self, path: Path) -> Finished:
        """Read the results of an interrupted run, and take its seed.

        Raises ParameterError if the file has another seed than the options.
        """
        finished = read_finished(path, self._digests, [line.samples for line in self._prompts], self._model_digest)
        if finished.run_seed is not None:
            if self._given_seed not in (None, finished.run_seed):
                raise ParameterError(
                    f"{path} was made with seed {finished.run_seed}, but seed is {self._given_seed}; give the "
                    "same seed or none, or start again with --overwrite."
                )
            self.run_seed = finished.run_seed
        return finished

    def answers(self, batch: Sequence[PromptLine]) -> list[dict[str, Any]]:
        """Answer a batch. Returns the lines of its prompts. A prompt that fails gets a line with the error.

        Raises GenerationError for failures of the machine, such as too little memory or a device error.
        """
        try:
            results = self._generate(batch)
        except (PromptError, ParameterError, LogitsError) as error:  # caused by a prompt, not by the machine
            if len(batch) > 1:  # answer one by one, to find which prompt fails
                return [answer for line in batch for answer in self.answers([line])]
            self.failed += 1
            return [{**self._line_head(batch[0]), "error": str(error), "error_type": type(error).__name__}]
        self._sequences += len(results)
        self._tokens += sum(len(result.token_ids) for result in results)
        self._certified += sum(sum(result.certified) for result in results)
        line_of_result = [line for line in batch for _ in range(line.samples)]
        pairs = zip(line_of_result, results, strict=True)
        return [{**self._line_head(line), **result.as_dict()} for line, result in pairs]

    def _line_head(self, line: PromptLine) -> dict[str, Any]:
        """The first fields of an answer's line, by which a resumed run recognises the line."""
        head = {"index": line.index, "id": line.id, "request": self._digests[line.index]}
        return {**head, "model": self._model_digest, "run_seed": self.run_seed}

    def _generate(self, batch: Sequence[PromptLine]) -> list[GenerationResult]:
        from topw_deploy.sampling.seeds import prompt_seed

        prompts: list[Any] = [self._encoded[line.index] for line in batch]
        for prompt in prompts:
            if isinstance(prompt, TopWError):
                raise prompt
        columns = [{"seed": prompt_seed(self.run_seed, line.index), **line.parameters} for line in batch]
        if len(batch) == 1:
            return self._model.generate(prompts, **columns[0])
        batch_wide = _batch_wide_parameters(batch[0])
        names = dict.fromkeys(name for column in columns for name in column if name not in batch_wide)
        parameters = {name: [column.get(name) for column in columns] for name in names} | batch_wide
        return self._model.generate(prompts, **parameters)

    def report(self, seconds: float) -> None:
        """Print the numbers of --stats. seconds: duration of the run."""
        share = f"; certified {self._certified / self._tokens:.1%}" if self._tokens else ""
        counts = f"{count_text(self._sequences, 'sequence')}, {count_text(self._tokens, 'token')}"
        tell(f"{counts} in {seconds:.1f} s{share}; {self._model.sampler} sampler, run seed {self.run_seed}")


def _encode_prompt(model: TopWModel, line: PromptLine) -> str | list[int] | TopWError:
    """The prompt as text or token ids, or the error of a chat template that refuses the prompt.

    Raises TokenizerError, naming the line, if the model has no template.
    """
    if line.kind != "messages":
        prompt: str | list[int] = line.prompt
        return prompt
    try:
        return model.tokenizer.encode(model.apply_chat_template(line.prompt), add_special_tokens=False)
    except TokenizerError as error:
        raise TokenizerError(f"{line.where}: {error}") from None
    except PromptError as error:
        return error


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


@contextlib.contextmanager
def _resume_hint(path: Path | None) -> Iterator[None]:
    """If the block is interrupted or fails, print how to continue."""
    try:
        yield
    except (KeyboardInterrupt, TopWError):
        if path is not None:
            tell(f"Finished answers are in {path}; run the same command with --resume to continue.")
        raise


_START = b'{"index": '  # first bytes of every line
# Some readers, such as str.splitlines, take these characters for line breaks. json escapes the other line breaks.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
_SEEDS = 1 << 64  # number of seeds (docs/contract/random.md)
_SYNC_SECONDS = 1.0  # minimum time between disk syncs


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


def check_answers(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ParameterError if answers must not be written to `path`."""
    if path.is_dir():
        raise ParameterError(f"{path} is a folder; choose another name.")
    if not path.parent.is_dir():
        raise ParameterError(f"{path} cannot be written, because {path.parent} is not a folder; choose another name.")
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
        answer = _parse_line(line)
        _check_line(answer, f"line {number} of {path}", finished.prompts, requests, model, finished.run_seed)
        size += len(line) + 1
        sequences += 1
        failed = "error" in answer
        if failed or sequences == samples[finished.prompts]:
            finished = Finished(finished.prompts + 1, finished.failed + failed, size, answer["run_seed"])
            sequences = 0
    if not unfinished.startswith(_START[: len(unfinished)]):
        raise ParameterError(f"the end of {path} was not written by this command; choose another --output.")
    return finished


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check_line(answer: Any, place: str, index: int, requests: Sequence[str], model: str, run_seed: int | None) -> None:
    """Raises ParameterError unless `answer` is a line for the prompt `index` of this run.

    place: of the line, for error messages.
    run_seed: seed of the lines before; None without lines.
    """
    advice = "give the same input and options as before, or start again with --overwrite"
    if not isinstance(answer, dict) or not {"index", "request", "model", "run_seed"} <= answer.keys():
        raise ParameterError(f"{place} was not written by this command; choose another --output.")
    if answer["model"] != model:
        raise ParameterError(f"{place} was made with another model; {advice}.")
    if index >= len(requests):
        raise ParameterError(f"{place} answers a prompt that the input lacks, which has {len(requests)}; {advice}.")
    if answer["index"] != index or answer["request"] != requests[index]:
        raise ParameterError(f"{place} answers another prompt, or one with other parameters; {advice}.")
    seed = answer["run_seed"]
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise ParameterError(f"{place} has the run_seed {seed!r:.60}, not an integer in [0, 2**64); {advice}.")
    if run_seed not in (None, seed):
        raise ParameterError(f"{place} has another run_seed than the lines before it; {advice}.")


class AnswerFile:
    """A context that appends answers to a file.

    path: the file; None for stdout.
    size: number of bytes of the file that are kept; answers follow them.
    """

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self._path, self._size = path, size
        self._synced = time.monotonic()

    def __enter__(self) -> AnswerFile:
        self._stream: BinaryIO = sys.stdout.buffer if self._path is None else self._open(self._path)
        return self

    def _open(self, path: Path) -> BinaryIO:
        try:
            stream = path.open("r+b" if path.exists() else "xb")
        except OSError as error:
            raise ParameterError(f"{path} cannot be written ({error.strerror or error}).") from None
        stream.truncate(self._size)
        stream.seek(self._size)
        return stream

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write and flush lines, whose first field must be "index". Syncs the disk at most once a second."""
        texts = [json.dumps(line, ensure_ascii=False).translate(_ESCAPED) + "\n" for line in lines]
        self._stream.write("".join(texts).encode())
        self._stream.flush()
        if self._path is not None and time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._stream.fileno())
            self._synced = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            try:
                os.fsync(self._stream.fileno())
            finally:
                self._stream.close()
