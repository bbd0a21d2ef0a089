"""Run an exported folder one way, and compare it with recorded tokens and the CPU's time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.job import Job, Result
from topw_deploy.errors import BenchmarkError, TopWError

if TYPE_CHECKING:
    from topw_deploy.runtime import TopWModel

EARLY = 4
"""Number of steps. A wrong cache or operator shows at once in nearly all sequences; rounding shows later, in few."""

MOST_EARLY = 0.25
"""Largest share of sequences that may differ within EARLY steps: CPUs round 4-bit products differently."""

LEAST_EQUAL_FLOAT32 = 0.95
"""Smallest share of equal sequences in float32: logits differ by about 1e-5, which changes one draw in thousands."""

_TIMED_TOKENS = 256
_WARMUP = 2


@dataclass(frozen=True)
class Way:
    """How to open and call an exported folder.

    options: arguments of `TopWModel.from_pretrained`.
    sampler: the sampler that the model must report; "" for any.
    threads: concurrent `generate` calls on one model.
    stands_in: what this way replaces in a rehearsal.
    """

    options: Mapping[str, Any]
    sampler: str = ""
    threads: int = 1
    stands_in: str = ""


def run_way(folder: Path, way: Way, job: Job) -> Result:
    """Open the folder, compare its tokens with the recorded ones, and time it. The result fails if it does not open."""
    from topw_deploy.runtime import TopWModel

    notes: list[str] = []
    try:
        with ExitStack() as opened:
            model = opened.enter_context(TopWModel.from_pretrained(folder, **way.options))
            if way.sampler and model.sampler != way.sampler:
                return Result(
                    failed=f"{way.sampler} should choose the tokens, but {model.sampler} does: {model.why_graph}"
                )
            cpu = _open_on_cpu(folder, opened, notes)
            asked, wanted = _reference_tokens(folder, cpu)
            difference = compare_tokens(draw_concurrently(model, asked, way.threads), wanted)
            times = time_generation(model, cpu, way.threads, min(job.rounds, 2 if job.rehearse else 20), job.rehearse)
            return _result(model, way, difference, times, why_not_rounding(difference, _is_float32(model)), notes)
    except TopWError as error:
        return Result(failed=str(error), absent=tuple(notes))


def _reference_tokens(folder: Path, cpu: TopWModel | None) -> tuple[list[dict[str, Any]], Sequences]:
    """The requests and the CPU's tokens: the recorded ones, else drawn here."""
    known = load_tokens(folder)
    if known is not None:
        return known["requests"], known["tokens"]
    if cpu is None:
        raise BenchmarkError(f"{folder} has no recorded tokens, and the CPU does not open it: pack it.")
    asked = requests()
    return asked, draw_tokens(cpu, asked)


def draw_concurrently(model: TopWModel, asked: Sequence[dict[str, Any]], threads: int) -> Sequences:
    """The tokens of every request, in order; each thread takes the next request when it is free."""
    with ThreadPoolExecutor(threads) as pool:
        answers = pool.map(lambda request: draw_tokens(model, [request]), asked)
        return [sequence for answer in answers for sequence in answer]


def time_generation(
    model: TopWModel, cpu: TopWModel | None, threads: int, rounds: int, rehearse: bool = False
) -> dict[str, list[float]]:
    """Milliseconds per token in each round, of "this" model and of "cpu", the same folder on the CPU if it opens there.

    Each thread generates one sequence, and the slowest thread counts.
    """
    from benchmarks.common import interleave

    length = 32 if rehearse else _TIMED_TOKENS

    def one(of: TopWModel) -> float:
        result = of.generate(PROMPTS[0], seed=1, max_new_tokens=length, ignore_eos=True)
        return 1e3 * result.timings.decode_seconds / max(1, result.timings.decode_steps)

    def together(of: TopWModel) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return max(pool.map(lambda _: one(of), range(threads)))

    sides: dict[str, Callable[[], float]] = {"this": lambda: together(model)}
    if cpu is not None:
        sides["cpu"] = lambda: one(cpu)
    return interleave(sides, rounds, warmup=_WARMUP)


def why_not_rounding(difference: Difference, float32: bool) -> str:
    """A sentence on why rounding cannot explain the difference; empty if it can."""
    early = sum(step < EARLY for step in difference.steps)
    if early > MOST_EARLY * difference.sequences:
        return (
            f"{early} of {difference.sequences} sequences differ from the CPU's within {EARLY} steps, more than "
            f"{MOST_EARLY:.0%}: rounding does not explain that."
        )
    if float32 and difference.equal < LEAST_EQUAL_FLOAT32 * difference.sequences:
        return (
            f"{difference.equal} of {difference.sequences} sequences are the CPU's, in float32 fewer than "
            f"{LEAST_EQUAL_FLOAT32:.0%}."
        )
    return ""


def _open_on_cpu(folder: Path, opened: ExitStack, notes: list[str]) -> TopWModel | None:
    from topw_deploy.runtime import TopWModel

    try:
        return opened.enter_context(TopWModel.from_pretrained(folder, provider="cpu"))
    except TopWError as error:
        notes.append(f"not timed beside the CPU, which does not open the folder: {error}")
        return None


def _is_float32(model: TopWModel) -> bool:
    decoder = model.manifest.decoder
    return (decoder.kv_dtype, decoder.weights_dtype) == ("float", "float")


def _result(
    model: TopWModel, way: Way, difference: Difference, times: dict[str, list[float]], failed: str,
    notes: Sequence[str],
) -> Result:  # fmt: skip
    from benchmarks.common import Spread, ratio, table

    this, cpu = Spread.of(times["this"]), times.get("cpu")
    beside = Spread.of(cpu) if cpu else None
    first = "" if difference.first is None else f", first at step {difference.first}"
    provider = model.provider + (f", stands in for {way.stands_in}" if way.stands_in else "")
    row = (
        provider, model.sampler, f"{difference.equal} of {difference.sequences}{first}", this.format(digits=3),
        beside.format(digits=3) if beside else "", ratio(times, "this", "cpu").format() if cpu else "",
    )  # fmt: skip
    head = ("provider", "sampler", "sequences equal to the CPU's", "ms per token", "CPU's", "ratio")
    data = {
        "provider": provider, "sampler": model.sampler, "why_graph": model.why_graph, **difference.as_json(),
        "load_seconds": model.load_seconds, "ms_per_token": times,
    }  # fmt: skip
    return Result(data, table(head, [row]), failed, tuple(notes))


SUFFIX = ".tokens.json"
"""The suffix to a folder's name that names the file beside it with the CPU's tokens."""

FORMAT = 1
PROMPTS = ["def parse(", "class Path", "Return the", "import os"]
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"lam": 0.5, "temperature": 1.5},
    {"lam": 0.5, "init_top_p": 0.5, "geom_scale": 0.05},
    {"temperature": 0.0},
)
TOKENS = 48
Sequences = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """The difference between two lists of sequences.

    sequences: number of sequences.
    steps: the first differing step of each sequence that differs.
    first: the smallest of `steps`, or None.
    """

    sequences: int
    steps: tuple[int, ...]

    @property
    def equal(self) -> int:
        return self.sequences - len(self.steps)

    @property
    def first(self) -> int | None:
        return min(self.steps, default=None)

    def as_json(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "equal": self.equal, "first_difference": self.first,
                "differ_from_step": list(self.steps)}  # fmt: skip


def requests(seeds: int = 3, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Arguments of `generate` by request: every choice of parameters and every seed, prompts alone and in a batch."""
    prompts: list[Any] = [*PROMPTS, PROMPTS]
    return [
        {"prompt": prompt, "seed": seed, "max_new_tokens": tokens, **choice}
        for choice in CHOICES
        for seed in range(seeds)
        for prompt in prompts
    ]


def draw_tokens(model: TopWModel, asked: Iterable[dict[str, Any]]) -> Sequences:
    """The tokens of every sequence, batches in order."""
    drawn: Sequences = []
    for request in asked:
        answer = model.generate(**request)
        drawn += [result.token_ids for result in (answer if isinstance(answer, list) else [answer])]
    return drawn


def compare_tokens(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Difference:
    """Compare two lists of sequences. Raises BenchmarkError if their lengths differ."""
    if len(found) != len(wanted):
        raise BenchmarkError(f"{len(found)} sequences were drawn, but {len(wanted)} are recorded; pack again.")
    steps = []
    for mine, other in zip(found, wanted, strict=True):
        differing = (i for i, (a, b) in enumerate(zip_longest(mine, other)) if a != b)
        step = next(differing, None)
        if step is not None:
            steps.append(step)
    return Difference(len(wanted), tuple(steps))


def record_tokens(folder: Path, asked: Sequence[dict[str, Any]]) -> None:
    """Write this CPU's tokens. Raises TopWError if `folder` does not open."""
    import onnxruntime

    from topw_deploy.runtime import TopWModel

    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        text = {
            "format": FORMAT, "onnxruntime": onnxruntime.__version__, "sampler": model.sampler,
            "requests": list(asked), "tokens": draw_tokens(model, asked),
        }  # fmt: skip
    tokens_file(folder).write_text(json.dumps(text) + "\n", encoding="utf-8")


def tokens_file(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def load_tokens(folder: Path) -> dict[str, Any] | None:
    """The recorded tokens, or None. Raises BenchmarkError for another format."""
    path = tokens_file(folder)
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} holds no recorded tokens ({error}); pack again.") from None
    if version != FORMAT:
        raise BenchmarkError(f"{path} has format {version}, but this checkout reads {FORMAT}; pack again with it.")
    return found
