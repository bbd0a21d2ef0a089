"""`topw bench decode`: a whole decoding loop, of this package and of other libraries with the same weights.

Measured of each side, in its own process: seconds to the first token, and seconds per token after it. This file is
also the worker of `TopWModel` and of ArgMax.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.manifest import DecoderInfo, load_decoder_manifest
from topw_deploy.plugins.library import library_path
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.cache import Cache, Caches
from topw_deploy.runtime.ort.session import OrtSession
from topw_deploy.text import count_text
from topw_lab.bench import base
from topw_lab.tables import significant

_LIBRARIES = {
    "genai": ("onnxruntime-genai", "onnxruntime_genai",
              "FOLDER, written by python -m onnxruntime_genai.models.builder"),
    "transformers": ("transformers", "transformers", "MODEL_DIR"),
}  # fmt: skip
"""Option with the model's folder -> (library, module, what to give)."""
_GREEDY, _TOP_P = ("greedy", "greedy", None), (f"top-p {base.TOP_P}", "top-p", None)
_PEER_SIDES: dict[str, tuple[tuple[str, str, str, str | None], ...]] = {
    "genai": (("genai-greedy", *_GREEDY), ("genai-top-p", *_TOP_P),
              ("genai-top-k", f"top-k {base.TOP_K}, top-p {base.TOP_P}", "top-k-top-p", None)),
    "transformers": (("transformers-greedy", *_GREEDY), ("transformers-top-p", *_TOP_P),
                     ("transformers-topw", "our processor", "all", "topw"),
                     ("transformers-authors", "authors' processor", "all", "authors")),
}  # fmt: skip
"""Option -> (name, label, search, logits processor) of each side."""
_HEADER = ("side", "ms/token (quartiles)", "ratio (quartiles)", "first token ms", "prompt tokens/s")


def sides(folder: Path, **options: Path | None) -> list[base.Side]:
    """Every side, in the order of the table. options: see `run`.

    Raises BenchmarkError if the folder of a library is given, but the library is missing.
    """
    why_no_argmax = None if install.is_importable("onnx_ir") else f"not installed: {install.install_command('export')}"
    if not os.access(folder, os.W_OK):
        why_no_argmax = f"without a place for its graph: {folder} cannot be written; give a copy"
    found = [
        base.Side(name=name, label=label, kind=kind, worker=__file__, why_not=why_not,
             settings={"folder": str(folder), "variant": variant})
        for variant, name, label, kind, why_not in (
            ("native", "topw-native", "TopWModel, native", "ours", base.why_no_native_library()),
            ("graph", "topw-graph", "TopWModel, graph", "ours", None),
            ("argmax", "argmax", "same graph, ArgMax", "yardstick", why_no_argmax),
        )
    ]  # fmt: skip
    authors = options.get("authors")
    for option, (library, module, advice) in _LIBRARIES.items():
        source, python = options.get(option), options.get(f"{option}_python")
        why_not = _why_not(module, source, python, f"--{option} {advice}")
        for name, label, search, processor in _PEER_SIDES[option]:
            if processor != "authors" or authors is not None:
                found.append(base.Side(
                    name=name,
                    label=f"{library}, {label}",
                    kind="ours" if processor == "topw" else "peer",
                    worker=base.PEERS,
                    settings={"task": "decode" if option == "genai" else library, "folder": str(source),
                              "search": base.SEARCHES[search],
                              "processor": str(authors) if processor == "authors" else processor},
                    python=python,
                    why_not=why_not,
                ))  # fmt: skip
    return found


def _why_not(module: str, folder: Path | None, python: Path | None, option: str) -> str | None:
    """`Side.why_not` of the sides of another library."""
    if python is None and not install.is_importable(module):
        distribution = module.replace("_", "-")
        missing = f"not installed: pip install {distribution}, or give the interpreter of its environment"
        if folder is not None:
            raise BenchmarkError(f"{folder} is given, but {distribution} is {missing}.")
        return f"{missing}; then give {option}"
    return None if folder is not None else f"without a model: give {option}"


def run(
    folder: Path,
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    threads: Sequence[int] = (1,),
    peers: Sequence[str] = (),
    rounds: int = 9,
    seed: int = 0,
    progress: Progress = SILENT,
    **libraries: Path | None,
) -> base.Report:
    """Measure all sides in turn, each in its own process.

    folder: an exported model.
    prompt_tokens: length of the random prompt.
    new_tokens: number of tokens to generate, at least 2.
    threads: thread counts; all sides run with each of them.
    peers: names of sides; empty for all.
    libraries: "transformers" and "genai" (folders with the same weights in each library's format), "genai_python" (the
        interpreter of an environment with onnxruntime-genai), and "authors" (the file with the authors' logits
        processor, which runs in transformers).

    Raises ManifestError for a folder without a decoder, ParameterError for lengths that exceed the context,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    settings = {name: value for name, value in locals().items() if name != "progress"}
    if libraries.get("authors") and libraries.get("transformers") is None:
        raise ParameterError("the authors' processor runs in transformers; give --transformers, too.", "authors")
    prompt = base.random_prompt(folder, prompt_tokens, new_tokens, seed)
    present, absent = base.choose(sides(folder, **libraries), peers)
    report = base.Report("decode", settings, absent, "one token after the first")
    with progress.bar(len(threads) * len(present) * (rounds + 1), "run") as advance:
        for count in threads:
            with base.start_workers(present, count, progress) as workers:
                calls = {
                    name: partial(worker.call, "run", prompt=prompt, new_tokens=new_tokens)
                    for name, worker in workers.items()
                }
                samples = base.interleave(calls, rounds, seed=seed, advance=advance)
            per_token = {
                name: [run["rest"] / max(1, run["tokens"] - 1) for run in runs] for name, runs in samples.items()
            }
            title = f"{count_text(count, 'thread')}, {prompt_tokens} + {new_tokens} tokens"
            _add_results(report, title, base.Times(present, per_token), samples)
    return report


def _add_results(
    report: base.Report, title: str, times: base.Times, samples: dict[str, list[dict[str, float]]]
) -> None:
    """Add the sides with one number of threads to the report."""
    rows = []
    for side in times.sides:
        first = base.Spread.of([run["first"] for run in samples[side.name]]).median
        rows.append((
            side.label,
            times.spread(side.name).format(1e3),
            times.ratio(side.name).format(digits=3),
            f"{first * 1e3:.1f}",
            significant(report.settings["prompt_tokens"] / first),
        ))  # fmt: skip
    report.add_table(f"{title}; the ratio is to {times.reference.label}", _HEADER, rows)
    for side in times.sides:
        fewest = min(run["tokens"] for run in samples[side.name])
        if fewest < report.settings["new_tokens"]:
            report.lines.append(f"{side.label} ended after {fewest} tokens.")
    certified = [run["certified"] for runs in samples.values() for run in runs if "certified" in run]
    if certified:
        fewest = min(certified)
        report.lines.append("All steps were certified." if fewest == 1 else f"Certified steps: at least {fewest:.1%}.")
    report.runs.append({"title": title, **times.as_dict(runs=samples)})
    finding = f"A token with Top-W takes {times.spread(times.reference.name).median * 1e3:.2f} ms"
    if "argmax" in times.seconds:
        finding += f", {1 / times.ratio('argmax').median:.2f}x the same graph with ArgMax"

    def text(side: base.Side) -> str:
        factor = "" if side.kind == "ours" else f"   {times.ratio(side.name).median:.2f}x ours"
        return f"{times.spread(side.name).median * 1e3:.2f} ms{factor}"

    report.panels.append(times.panel(title, finding, text))


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns `run`.

    settings: "folder" (the exported model), "variant" ("native" or "graph", a sampler of `TopWModel`; or "argmax"),
        "threads" of the session.

    `run` generates once. It returns seconds to the first token ("first"), seconds of the other tokens ("rest"), the
    number of tokens ("tokens") and, of `TopWModel`, the share of certified tokens ("certified").
    """
    if settings["variant"] == "argmax":
        from topw_deploy.export.verification.reference import decoder_model, open_graph

        folder, options = Path(settings["folder"]), ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = settings["threads"], 3
        session = open_graph(folder, decoder_model(folder, argmax=True), library_path(), options)
        loop = ArgMaxLoop(session, load_decoder_manifest(folder).decoder)

        def run_argmax(prompt: list[int], new_tokens: int) -> dict[str, float]:
            started = time.perf_counter()
            loop.prefill(prompt, len(prompt) + new_tokens)
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                loop.step()
            return {"first": first - started, "rest": time.perf_counter() - first, "tokens": new_tokens}

        return {"run": run_argmax}
    model = TopWModel.from_pretrained(
        settings["folder"], provider="cpu", sampler=settings["variant"], intra_op_num_threads=settings["threads"]
    )

    def run_top_w(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        result = model.generate(prompt, max_new_tokens=new_tokens, seed=1, ignore_eos=True)
        seconds, rest = time.perf_counter() - started, result.timings.decode_seconds
        tokens, certified = len(result.token_ids), result.certified_share
        return {"first": seconds - rest, "rest": rest, "tokens": tokens, "certified": certified}

    return {"run": run_top_w}


class ArgMaxLoop:
    """Decodes greedily, one sequence at a time.

    session: of a decoder whose first output is the token of the largest logit.
    decoder: the manifest's description of the decoder's cache.
    token: int64 [1], the array that the graph writes the last token to.
    """

    def __init__(self, session: ort.InferenceSession, decoder: DecoderInfo) -> None:
        self._session, self._output = OrtSession(session), session.get_outputs()[0].name
        self._caches = Caches(self._session, decoder)
        self._cache: Cache | None = None
        self.token = np.zeros(1, np.int64)

    def prefill(self, prompt: list[int], capacity: int) -> int:
        """Begin a sequence with a prompt, and end the previous one. Returns the first token.

        capacity: maximum length of the sequence, including the prompt.
        """
        if self._cache is not None:
            self._cache.close()
        self._binding = self._session.bind()
        self._binding.bind_result(self._output, self.token)
        self._cache = self._caches.open(self._binding, [prompt], [capacity - len(prompt)])
        self._cache.feed_prompts()
        self._binding.run()
        self._cache.begin_decoding()
        return int(self.token[0])

    def step(self) -> int:
        """Append the last token to the sequence. Returns the next token."""
        assert self._cache is not None, "prefill begins a sequence"
        self._cache.input_ids[0, 0] = self.token[0]
        self._cache.advance((0,))
        self._binding.run()
        return int(self.token[0])
