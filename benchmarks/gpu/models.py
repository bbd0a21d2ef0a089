"""The part `models`: exported models on onnxruntime's CUDA provider, against the CPU's tokens and times.

Each way to run a folder is a step. It needs onnxruntime-gpu and exported folders. Rehearsals use the CPU provider.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.job import Job, Result, Step
from topw_deploy.errors import BenchmarkError, TopWError

if TYPE_CHECKING:
    from topw_deploy.runtime import TopWModel

CUDA = "CUDAExecutionProvider"
PROMPTS = ["def parse(", "class Path", "Return the", "import os"]
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"lam": 0.5, "temperature": 1.5},
    {"lam": 0.5, "init_top_p": 0.5, "geom_scale": 0.05},
    {"temperature": 0.0},
)
TOKENS = 48
Sequences = list[list[int]]

EARLY = 4
"""Number of steps. A wrong cache or operator shows at once in nearly all sequences; rounding shows later, in few."""

MOST_EARLY = 0.25
"""Largest share of sequences that may differ within EARLY steps: CPUs round 4-bit products differently."""

LEAST_EQUAL_FLOAT32 = 0.95
"""Smallest share of equal sequences in float32: logits differ by about 1e-5, which changes one draw in thousands."""

_LENGTH, _BATCH = 512, 4  # captured steps allocate the whole cache at once
_SECONDS, _LIMIT = 40, 240
_FORMAT = 1  # of recorded tokens
_BRING = "; bring pack-{}.tar.xz of `python -m benchmarks.gpu pack` along and name it with --pack"


@dataclass(frozen=True)
class Way:
    """How to open and call an exported folder.

    options: arguments of `TopWModel.from_pretrained`.
    sampler: the sampler that the model must report; "" for any.
    threads: concurrent `generate` calls on one model.
    """

    options: Mapping[str, Any]
    sampler: str = ""
    threads: int = 1


def steps(job: Job) -> list[Step]:
    found = [
        Step(f"{folder.name}, {name}", partial(run_on, folder, way), _SECONDS, _LIMIT, inputs)
        for folder in folders(job)
        for inputs in [(digest(folder), package_identity("onnxruntime"))]
        for name, way in ways_of(folder).items()
    ]
    return found or [absent(no_folders(job, "exported models"))]


def absent(sentence: str) -> Step:
    """A step that only reports what is missing."""
    return Step("missing", lambda job: Result(absent=(sentence,)), 1)


def no_folders(job: Job, what: str) -> str:
    return f"there are no {what} in {job.packed}" + _BRING.format("folders") + ", or name folders with --folder"


def ways_of(folder: Path) -> dict[str, Way]:
    """The ways to run the folder, by name. Captured steps get a cache of fixed size, which CUDA graphs need."""
    from topw_deploy.manifest import load_decoder_manifest

    length = min(_LENGTH, load_decoder_manifest(folder).decoder.context_length)
    graph = {"provider_options": {"enable_cuda_graph": "1"}, "max_length": length, "max_batch": _BATCH}
    return {
        "cpu": Way({"provider": "cpu"}),
        "cuda": Way({"provider": "cuda"}, "native"),
        "cuda, the file's function": Way({"provider": "cuda", "sampler": "graph"}, "graph"),
        "cuda, captured": Way({"provider": "cuda", **graph}, "native"),
        "cuda, captured, two threads": Way({"provider": "cuda", **graph}, "native", threads=2),
    }


def folders(job: Job) -> list[Path]:
    """The folders given with --folder, else the packed ones."""
    packed = (path.parent for path in job.packed.glob("[!.]*/*/topw_manifest.json"))
    return [Path(folder) for folder in job.folders] or sorted(packed)


def digest(folder: Path) -> str:
    """A digest of the manifest, which contains the files' hashes, and of the recorded tokens."""
    found = hashlib.sha256()
    for path in (folder / "topw_manifest.json", tokens_file(folder)):
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()[:16]


def package_identity(name: str) -> str:
    """The path of the file that `import name` would run, and the digest of that file."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return f"no {name}"
    return f"{spec.origin} {hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]}"


def run_on(folder: Path, way: Way, job: Job) -> Result:
    """Run one folder one way. In a rehearsal, the CPU provider replaces CUDA; it cannot capture steps."""
    if way.options["provider"] == "cuda" and job.rehearse:
        options = {name: value for name, value in way.options.items() if name != "provider_options"}
        way = replace(way, options={**options, "provider": "cpu"})
    elif way.options["provider"] == "cuda":
        why = why_no_cuda()
        if why:
            return Result(absent=(why,))
        if way.sampler == "native":
            os.environ["TOPW_CUDA_LIBRARY"] = str(job.kernels())
    found = run_way(folder, way, job)
    if found.data:
        import onnxruntime

        # Distinguishes the packed onnxruntime from the host's.
        found.data["onnxruntime"] = f"{onnxruntime.__version__}, {Path(onnxruntime.__file__).parent}"
    return found


def why_no_cuda() -> str:
    """Why onnxruntime cannot run on CUDA; empty if it can."""
    try:
        import onnxruntime
    except ImportError as error:
        return f"onnxruntime cannot be imported ({error})" + _BRING.format("onnxruntime")
    if CUDA in onnxruntime.get_available_providers():
        return ""
    where = f"the onnxruntime {onnxruntime.__version__} of {Path(onnxruntime.__file__).parent}"
    return f"{where} is for CPUs: no model was run on CUDA" + _BRING.format("onnxruntime")


def run_way(folder: Path, way: Way, job: Job) -> Result:
    """Open the folder, compare its tokens with the recorded ones, and time it. The result fails if it does not open."""
    from topw_deploy.runtime import TopWModel

    try:
        with ExitStack() as opened:
            model = opened.enter_context(TopWModel.from_pretrained(folder, **way.options))
            if way.sampler and model.sampler != way.sampler:
                why = f"{way.sampler} should choose the tokens, but {model.sampler} does: {model.why_graph}"
                return Result(failed=why)
            asked, wanted = load_tokens(folder)
            cpu: TopWModel | None = None
            notes: tuple[str, ...] = ()
            try:
                cpu = opened.enter_context(TopWModel.from_pretrained(folder, provider="cpu"))
            except TopWError as error:
                notes = (f"not timed beside the CPU, which does not open the folder: {error}",)
            difference = compare_tokens(draw_tokens(model, asked, way.threads), wanted)
            times = time_generation(model, cpu, way.threads, job)
            decoder = model.manifest.decoder
            float32 = (decoder.kv_dtype, decoder.weights_dtype) == ("float", "float")
            return _result(model, difference, times, why_not_rounding(difference, float32), notes)
    except TopWError as error:
        return Result(failed=str(error))


def time_generation(model: TopWModel, cpu: TopWModel | None, threads: int, job: Job) -> dict[str, list[float]]:
    """Milliseconds per token in each round, of "this" model and of "cpu", the same folder on the CPU if it opens there.

    Each thread generates one sequence, and the slowest thread counts.
    """
    from benchmarks.common import interleave

    length, rounds = (32, 2) if job.rehearse else (256, 20)

    def one(of: TopWModel) -> float:
        result = of.generate(PROMPTS[0], seed=1, max_new_tokens=length, ignore_eos=True)
        return 1e3 * result.timings.decode_seconds / max(1, result.timings.decode_steps)

    def together() -> float:
        with ThreadPoolExecutor(threads) as pool:
            return max(pool.map(lambda _: one(model), range(threads)))

    sides: dict[str, Callable[[], float]] = {"this": together}
    if cpu is not None:
        sides["cpu"] = lambda: one(cpu)
    return interleave(sides, min(job.rounds, rounds), warmup=2)


def _result(
    model: TopWModel, difference: Difference, times: dict[str, list[float]], failed: str, notes: tuple[str, ...]
) -> Result:
    from benchmarks.common import Spread, ratio, table

    first = min(difference.steps, default=None)
    equal = f"{difference.equal} of {difference.sequences}" + ("" if first is None else f", first at step {first}")
    beside = ("", "")
    if "cpu" in times:
        beside = Spread.of(times["cpu"]).format(digits=3), ratio(times, "this", "cpu").format()
    head = ("provider", "sampler", "sequences equal to the CPU's", "ms per token", "CPU's", "ratio")
    row = (model.provider, model.sampler, equal, Spread.of(times["this"]).format(digits=3), *beside)
    data = {
        "provider": model.provider, "sampler": model.sampler, "why_graph": model.why_graph,
        "sequences": difference.sequences, "equal": difference.equal, "first_difference": first,
        "differ_from_step": list(difference.steps), "load_seconds": model.load_seconds, "ms_per_token": times,
    }  # fmt: skip
    return Result(data, table(head, [row]), failed, notes)


@dataclass(frozen=True)
class Difference:
    """The difference between two lists of sequences.

    sequences: number of sequences.
    steps: the first differing step of each sequence that differs.
    """

    sequences: int
    steps: tuple[int, ...]

    @property
    def equal(self) -> int:
        return self.sequences - len(self.steps)


def compare_tokens(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Difference:
    """Compare two lists of sequences. Raises BenchmarkError if their lengths differ."""
    if len(found) != len(wanted):
        raise BenchmarkError(f"{len(found)} sequences were drawn, but {len(wanted)} are recorded; pack again.")
    steps = []
    for mine, other in zip(found, wanted, strict=True):
        steps += [next(i for i, (a, b) in enumerate(zip_longest(mine, other)) if a != b)] if mine != other else []
    return Difference(len(wanted), tuple(steps))


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


def requests(seeds: int = 3, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Arguments of `generate` by request: every choice of parameters and every seed, prompts alone and in a batch."""
    prompts: list[Any] = [*PROMPTS, PROMPTS]
    return [
        {"prompt": prompt, "seed": seed, "max_new_tokens": tokens, **choice}
        for choice in CHOICES
        for seed in range(seeds)
        for prompt in prompts
    ]


def draw_tokens(model: TopWModel, asked: Sequence[dict[str, Any]], threads: int = 1) -> Sequences:
    """The tokens of every sequence, batches in order; each thread takes the next request when it is free."""
    with ThreadPoolExecutor(threads) as pool:
        answers: list[Any] = list(pool.map(lambda request: model.generate(**request), asked))
    lists = [answer if isinstance(answer, list) else [answer] for answer in answers]
    return [result.token_ids for results in lists for result in results]


def tokens_file(folder: Path) -> Path:
    """The file with the CPU's tokens, beside the folder."""
    return folder.with_name(f"{folder.name}.tokens.json")


def record_tokens(folder: Path, asked: Sequence[dict[str, Any]]) -> None:
    """Write this CPU's tokens. Raises TopWError if `folder` does not open."""
    from topw_deploy.runtime import TopWModel

    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        text = {"format": _FORMAT, "requests": list(asked), "tokens": draw_tokens(model, asked)}
    tokens_file(folder).write_text(json.dumps(text) + "\n", encoding="utf-8")


def load_tokens(folder: Path) -> tuple[list[dict[str, Any]], Sequences]:
    """The recorded requests and tokens; records them first if there are none.

    Raises BenchmarkError for another format, TopWError if the CPU does not open the folder.
    """
    path = tokens_file(folder)
    if not path.is_file():
        record_tokens(folder, requests())
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != _FORMAT:
        raise BenchmarkError(f"{path} has format {found.get('format')}, not {_FORMAT}; pack again with this checkout.")
    return found["requests"], found["tokens"]
