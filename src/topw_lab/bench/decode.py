"""`topw bench decode`: a whole decoding loop, of this package and of other libraries with the same weights.

Measured of each side, in its own process: seconds to the first token, seconds per token after it, time to load the
model, and the largest resident memory. This file is also the worker of `TopWModel` and of ArgMax.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime.cache import Cache, new_caches
from topw_deploy.runtime.ort.session import OrtSession
from topw_deploy.runtime.session import Binding
from topw_deploy.text import count_text
from topw_lab.bench.measure import Spread, interleave, this_machine
from topw_lab.bench.sides import (
    FOLDER,
    SEARCHES,
    TOP_K,
    TOP_P,
    Report,
    Side,
    Times,
    choose,
    random_prompt,
    start_workers,
    why_no_native_library,
)
from topw_lab.plots import Panel, draw_panels
from topw_lab.tables import comparison, significant, table

_GROUPS = ("topw", "genai", "optimum", "transformers")
_LABELS = {"greedy": "greedy", "top-p": f"top-p {TOP_P}", "top-k-top-p": f"top-k {TOP_K}, top-p {TOP_P}"}
_COMPARED = {"genai-top-p": "onnxruntime-genai with top-p", "transformers-authors": "the authors' code"}
_HEADER = ("side", "ms/token (quartiles)", "ratio (quartiles)", "first token ms", "prompt tokens/s", "load s",
           "peak MiB")  # fmt: skip
_WARMUP_ROUNDS = 1
_SCRATCH_PREFIX = ".topw-bench-"


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """Options of `topw bench decode`.

    folder: an exported model.
    prompt_tokens: length of the random prompt.
    new_tokens: number of tokens to generate, at least 2.
    threads: thread counts; all sides run with each of them.
    transformers, optimum, genai: folders with the same weights in each library's format.
    optimum_python, genai_python: Python interpreters of the environments with these libraries.
    authors: the file with the authors' logits processor, which runs in transformers.
    peers: names of sides; empty for all.
    rounds: number of times that each side is timed.
    seed: of the prompt and of the order of the sides.
    """

    folder: Path
    prompt_tokens: int = 128
    new_tokens: int = 64
    threads: Sequence[int] = (1,)
    transformers: Path | None = None
    optimum: Path | None = None
    optimum_python: Path | None = None
    genai: Path | None = None
    genai_python: Path | None = None
    authors: Path | None = None
    peers: Sequence[str] = ()
    rounds: int = 9
    seed: int = 0


def sides(request: DecodeRequest) -> Iterator[Side]:
    """Every side, in the order of the table.

    Raises BenchmarkError if the folder of a library is given, but the library is missing.
    """
    why_no_argmax = None if install.is_importable("onnx_ir") else f"not installed: {install.install_command('export')}"
    for variant, name, label, kind, why_not in (
        ("native", "topw-native", "TopWModel, native", "ours", why_no_native_library()),
        ("graph", "topw-graph", "TopWModel, graph", "ours", None),
        ("argmax", "argmax", "same graph, ArgMax", "yardstick", why_no_argmax),
    ):
        settings = {"folder": str(request.folder), "variant": variant}
        yield Side(name=name, label=label, kind=kind, worker=__file__, settings=settings, why_not=why_not)
    option = "--genai FOLDER, written by python -m onnxruntime_genai.models.builder"
    why_not = _why_not("onnxruntime_genai", "onnxruntime-genai", request.genai, request.genai_python, option)
    for name, search in (("greedy", "greedy"), ("top-p", "top-p"), ("top-k", "top-k-top-p")):
        yield Side(
            name=f"genai-{name}",
            label=f"onnxruntime-genai, {_LABELS[search]}",
            kind="peer",
            worker=FOLDER / "genai.py",
            settings={"task": "decode", "folder": str(request.genai), "search": SEARCHES[search]},
            python=request.genai_python,
            why_not=why_not,
        )
    option = "--optimum FOLDER, written by optimum-cli export onnx"
    optimum = _why_not("optimum.onnxruntime", "optimum-onnx", request.optimum, request.optimum_python, option)
    option = "--transformers MODEL_DIR"
    transformers = _why_not("transformers", "transformers", request.transformers, None, option)
    for library, name, label, search, processor in (
        ("optimum", "greedy", "greedy", "greedy", None),
        ("optimum", "top-p", _LABELS["top-p"], "top-p", None),
        ("transformers", "greedy", "greedy", "greedy", None),
        ("transformers", "top-p", _LABELS["top-p"], "top-p", None),
        ("transformers", "topw", "our processor", "all", "topw"),
        ("transformers", "authors", "authors' processor", "all", str(request.authors)),
    ):
        folder = request.optimum if library == "optimum" else request.transformers
        if name != "authors" or request.authors is not None:
            yield Side(
                name=f"{library}-{name}",
                label=f"{library}, {label}",
                kind="ours" if processor == "topw" else "peer",
                worker=FOLDER / "generate.py",
                settings={
                    "library": library,
                    "folder": str(folder),
                    "search": SEARCHES[search],
                    "processor": processor,
                },
                python=request.optimum_python if library == "optimum" else None,
                why_not=optimum if library == "optimum" else transformers,
            )


def _why_not(module: str, distribution: str, folder: Path | None, python: Path | None, option: str) -> str | None:
    """`Side.why_not` of the sides of another library.

    module, distribution: names of the library.
    folder: the model in the library's format.
    python: interpreter of the library's environment; None if the library must be in this one.
    option: the option that gives `folder`.
    """
    is_installed = python is not None or install.is_importable(module)
    missing = f"not installed: pip install {distribution}, or give the interpreter of its environment"
    if folder is not None and not is_installed:
        raise BenchmarkError(f"{folder} is given, but {distribution} is {missing}.")
    if not is_installed:
        return f"{missing}; then give {option}"
    return None if folder is not None else f"without a model: give {option}"


def run(request: DecodeRequest, progress: Progress = SILENT) -> Report:
    """Measure all sides in turn, each in its own process.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    if request.authors is not None and request.transformers is None:
        raise ParameterError(
            "the authors' processor runs in transformers; give the model's folder with --transformers.", "authors"
        )
    prompt = random_prompt(request.folder, request.prompt_tokens, request.new_tokens, request.seed)
    present, absent = choose([*sides(request)], request.peers, _GROUPS)
    machine = this_machine()
    tokens = f"{request.prompt_tokens} + {request.new_tokens} tokens"
    lines = [f"{machine}; {tokens}, {count_text(request.rounds, 'round')}"]
    runs, panels = [], []
    total = len(request.threads) * len(present) * (request.rounds + _WARMUP_ROUNDS)
    with (
        tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=_scratch_parent(request.folder)) as scratch,
        progress.bar(total, "run") as advance,
    ):
        present = [_with_argmax_file(side, request.folder, Path(scratch)) for side in present]
        for threads in request.threads:
            with start_workers(present, threads, progress) as workers:
                calls = {
                    name: partial(worker.call, "run", prompt=prompt, new_tokens=request.new_tokens)
                    for name, worker in workers.items()
                }
                samples = interleave(calls, request.rounds, _WARMUP_ROUNDS, seed=request.seed, advance=advance)
                costs = {
                    name: {each: worker.call(each) for each in ("load_seconds", "peak_bytes")}
                    for name, worker in workers.items()
                }
            seconds = {
                name: [run["rest"] / max(1, run["tokens"] - 1) for run in runs] for name, runs in samples.items()
            }
            times = Times(present, seconds)
            count = count_text(threads, "thread")
            rows = [_row(side, times, samples[side.name], request.prompt_tokens, costs[side.name]) for side in present]
            lines += [f"\n{count}; the ratio is to {times.reference.label}\n", table(_HEADER, rows)]
            lines += _notes(present, samples, request.new_tokens)
            runs.append({"threads": threads, "reference": times.reference.name, "sides": {
                side.name: {
                    "label": side.label,
                    "kind": side.kind,
                    "runs": samples[side.name],
                    **costs[side.name],
                    "seconds_per_token": asdict(times.spread(side.name)),
                    "first_token_seconds": asdict(Spread.of([run["first"] for run in samples[side.name]])),
                    "ratio": times.ratio_json(side.name),
                }
                for side in present
            }})  # fmt: skip
            panels.append(_panel(times, f"{count}, {tokens}"))
    note = f"Medians; whiskers are quartiles. {machine}."
    return Report(
        benchmark="decode",
        request=request,
        machine=machine,
        lines=lines,
        results={"runs": runs},
        draw=lambda path: draw_panels(path, panels, "one token after the first", note),
        absent=absent,
    )


def _row(
    side: Side, times: Times, runs: Sequence[dict[str, float]], prompt_tokens: int, costs: dict[str, Any]
) -> tuple[str, ...]:
    first = Spread.of([run["first"] for run in runs]).median
    return (
        side.label,
        times.spread(side.name).format(1e3),
        Spread.of(times.ratios(side.name)).format(digits=3),
        f"{first * 1e3:.1f}",
        significant(prompt_tokens / first),
        f"{costs['load_seconds']:.2f}",
        "" if costs["peak_bytes"] is None else f"{costs['peak_bytes'] / 2**20:.0f}",
    )


def _notes(present: Sequence[Side], samples: dict[str, list[dict[str, float]]], new_tokens: int) -> list[str]:
    """Lines below the table: sides that ended before `new_tokens` tokens, and the share of certified steps."""
    fewest = {side.label: min(run["tokens"] for run in samples[side.name]) for side in present}
    notes = [f"{label} ended after {tokens} tokens." for label, tokens in fewest.items() if tokens < new_tokens]
    certified = [run["certified"] for runs in samples.values() for run in runs if "certified" in run]
    return [*notes, f"Certified steps: {min(certified):.1%} or more."] if certified else notes


def _panel(times: Times, subtitle: str) -> Panel:
    title = f"A token with Top-W takes {times.spread(times.reference.name).median * 1e3:.2f} ms"
    if "argmax" in times:
        title += f", {1 / times.ratio('argmax'):.2f}x the same graph with ArgMax"
    factors = {label: times.ratio(name) for name, label in _COMPARED.items() if name in times}

    def text(side: Side) -> str:
        ratio = "" if side.kind == "ours" else f"   {times.ratio(side.name):.2f}x ours"
        return f"{times.spread(side.name).median * 1e3:.2f} ms{ratio}"

    return times.panel(subtitle, f"{title}: {comparison(factors)}" if factors else title, text)


def _with_argmax_file(side: Side, export: Path, scratch: Path) -> Side:
    """Write the model of the side `argmax` to `scratch`, and add the path to its settings. Other sides stay as is."""
    if side.name != "argmax":
        return side
    from topw_lab.bench.decode import write_argmax_model

    return replace(side, settings={**side.settings, "argmax": str(write_argmax_model(export, scratch))})


def _scratch_parent(folder: Path) -> Path | None:
    """The parent of `folder`, on whose file system weights can be hard-linked; None if nothing can be written there."""
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder.resolve().parent):
            return folder.resolve().parent
    except OSError:
        return None


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns `run`.

    settings: "folder" (the exported model), "variant" ("native" or "graph", a sampler of `TopWModel`; or "argmax"),
        "threads" of the session, and for ArgMax "argmax", the model of `write_argmax_model`.

    `run` generates once. It returns seconds to the first token ("first"), seconds of the other tokens ("rest"), the
    number of tokens ("tokens") and, of `TopWModel`, the share of certified tokens ("certified").
    """
    return {"run": (_load_argmax if settings["variant"] == "argmax" else _load_topw)(settings)}


def _load_topw(settings: dict[str, Any]) -> Callable[[list[int], int], dict[str, float]]:
    from topw_deploy.runtime import TopWModel

    model = TopWModel.from_pretrained(
        settings["folder"], provider="cpu", sampler=settings["variant"], intra_op_num_threads=settings["threads"]
    )

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        result = model.generate(prompt, max_new_tokens=new_tokens, seed=1, ignore_eos=True)
        seconds, rest = time.perf_counter() - started, result.timings.decode_seconds
        tokens, certified = len(result.token_ids), result.certified_share
        return {"first": seconds - rest, "rest": rest, "tokens": tokens, "certified": certified}

    return run


def _load_argmax(settings: dict[str, Any]) -> Callable[[list[int], int], dict[str, float]]:
    import onnxruntime as ort

    from topw_deploy.manifest import load_decoder_manifest
    from topw_lab.bench.decode import ArgMaxLoop

    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.log_severity_level = 3
    loop = ArgMaxLoop(Path(settings["argmax"]), load_decoder_manifest(settings["folder"]).decoder, options)

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        sequence = loop.prefill(prompt, len(prompt) + new_tokens)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            sequence.step()
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": new_tokens}

    return run


ARGMAX_FILE = "argmax.onnx"


def write_argmax_model(export: Path, folder: Path) -> Path:
    """Write `folder/argmax.onnx`: the model in `export` with ArgMax instead of the sampler. Returns its path.

    Hard-links the weights where possible, and copies them otherwise. Raises BenchmarkError unless the graph has exactly
    one sampler.
    """
    import onnx_ir as ir

    from topw_deploy.export.sampler.spec import OP_TYPE, SAMPLER_INPUTS

    model = ir.load(export / "model.onnx")
    graph = model.graph
    samplers = [node for node in graph if node.op_type == OP_TYPE]
    if len(samplers) != 1:
        raise BenchmarkError(f"{export} has {len(samplers)} samplers, but must have one; export the model again.")
    (sampler,) = samplers
    argmax = ir.Node("", "ArgMax", [sampler.inputs[0]], [ir.AttrInt64("axis", 1), ir.AttrInt64("keepdims", 0)])
    argmax.name = "argmax"
    graph.insert_after(sampler, argmax)
    token, old_token = argmax.outputs[0], next(value for value in graph.outputs if value.name == "next_token")
    states = [value for value in graph.outputs if value.name is not None and value.name.startswith("present.")]
    token.type, token.shape = old_token.type, old_token.shape
    graph.outputs.clear()
    graph.outputs.extend([token, *states])
    graph.remove(sampler, safe=True)
    token.name = "next_token"
    inputs = [value for value in graph.inputs if value.name not in SAMPLER_INPUTS]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    model.functions.clear()
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    link_weights(export, folder)
    ir.save(model, folder / ARGMAX_FILE)
    return folder / ARGMAX_FILE


def link_weights(export: Path, folder: Path) -> None:
    """Hard-link the data files of `export` into `folder`, or copy them where that is impossible."""
    for data in (path for pattern in ("*.onnx_data*", "*.onnx.data*") for path in export.glob(pattern)):
        try:
            os.link(data, folder / data.name)
        except OSError:
            shutil.copyfile(data, folder / data.name)


class ArgMaxLoop:
    """Decodes greedily, one sequence at a time, with the model of `write_argmax_model`.

    path: the model.
    decoder: the manifest's description of the model's cache.
    options: of the session.
    """

    def __init__(self, path: Path, decoder: DecoderInfo, options: ort.SessionOptions) -> None:
        self._session = OrtSession(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
        self._caches = new_caches(self._session, decoder)
        self._sequence: ArgMaxSequence | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the states; 0 before the first prompt, and if onnxruntime owns the cache."""
        return self._caches.bytes

    def prefill(self, prompt: list[int], capacity: int) -> ArgMaxSequence:
        """Run a prompt. The sequence of the previous prompt ends.

        capacity: maximum length of the sequence, including the prompt.
        """
        if self._sequence is not None:
            self._sequence.close()
        binding = self._session.bind()
        token = np.zeros(1, np.int64)
        binding.bind_result("next_token", token)
        cache = self._caches.open(binding, [prompt], [capacity - len(prompt)])
        cache.feed_prompts()
        binding.run()
        cache.begin_decoding()
        self._sequence = ArgMaxSequence(binding, cache, token)
        return self._sequence


class ArgMaxSequence:
    """A sequence of `ArgMaxLoop` after its prompt.

    token: int64 [1], the array that the binding writes the last token to.
    """

    def __init__(self, binding: Binding, cache: Cache, token: NDArray[np.int64]) -> None:
        self._binding, self._cache, self._token = binding, cache, token

    @property
    def token(self) -> int:
        """The last token."""
        return int(self._token[0])

    def step(self) -> int:
        """Append the last token to the sequence; returns the next token."""
        self._cache.input_ids[0, 0] = self._token[0]
        self._cache.advance((0,))
        self._binding.run()
        return int(self._token[0])

    def close(self) -> None:
        """Free the cache."""
        self._cache.close()
