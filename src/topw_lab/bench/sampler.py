"""`topw bench sampler`: one sampling step, from logits to a token, of Top-W and of every other installed sampler.

Measured: seconds per step, the mean over about 2 ms of calls on the same logits (`samplers`, and `genai` for
onnxruntime-genai). Before that, every implementation of Top-W must keep the reference's tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy import install
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import TopWOptions
from topw_deploy.text import count_text
from topw_lab.bench import samplers
from topw_lab.bench.logits import make_logits
from topw_lab.bench.measure import interleave, this_machine
from topw_lab.bench.samplers import Case, make_cases, read_logits
from topw_lab.bench.sides import (
    FOLDER,
    MIN_P,
    SEARCHES,
    TOP_K,
    TOP_P,
    Report,
    Side,
    Times,
    choose,
    start_workers,
    why_no_native_library,
)
from topw_lab.plots import Panel, draw_panels
from topw_lab.tables import comparison, duration, significant, table

_WARMUP_ROUNDS = 2
_YARDSTICK = "max"
_COMPARED = {"authors": "the authors' code", "hf-top-p": "transformers' top-p",
             "genai-top-p": "onnxruntime-genai's top-p"}  # fmt: skip
_EXPORTER, _TORCH = ("onnx_ir", "onnxscript"), ("torch", "transformers")
_SIDES: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("native", "Top-W native, onnxruntime op", "ours", "token", _EXPORTER),
    ("graph", "Top-W graph", "ours", "token", _EXPORTER),
    ("torch", "Top-W torch", "ours", "crop", ("torch",)),
    ("authors", "Top-W, authors' processor", "peer", "crop", _TORCH),
    ("hf-top-p", f"transformers top-p {TOP_P}", "peer", "crop", _TORCH),
    ("hf-top-k", f"transformers top-k {TOP_K}", "peer", "crop", _TORCH),
    ("hf-min-p", f"transformers min-p {MIN_P}", "peer", "crop", _TORCH),
    ("genai-top-p", f"onnxruntime-genai top-p {TOP_P}", "peer", "token", ("onnx",)),
    ("genai-top-k", f"onnxruntime-genai top-k {TOP_K}", "peer", "token", ("onnx",)),
    ("genai-top-k-top-p", f"onnxruntime-genai top-k {TOP_K}, top-p {TOP_P}", "peer", "token", ("onnx",)),
    ("genai-greedy", "onnxruntime-genai greedy", "peer", "token", ("onnx",)),
    ("max", "numpy.max", "yardstick", "number", ()),
    ("argmax", "onnxruntime ArgMax", "yardstick", "token", ("onnx",)),
    ("topk", "onnxruntime TopK 1200", "yardstick", "ids", ("onnx",)),
)
"""(name, label, kind, what one call returns, modules of [export] that it needs), in the order of the table."""


@dataclass(frozen=True, kw_only=True)
class SamplerRequest:
    """Options of `topw bench sampler`.

    vocab: width of the logits.
    hidden: width of the embeddings.
    batch: number of rows per step.
    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.
    options, geom_scale: of Top-W.
    logits: a .npy file, whose shape replaces `vocab` and `batch`; None for random logits.
    neighbour_bound: whether the neighbour bound is computed, for the tokens of the pools.
    peers: names of sides, or "hf" or "genai" for several; empty for all.
    authors: the file with the authors' logits processor.
    genai_python: interpreter of an environment with onnxruntime-genai.
    rounds: number of times that each side is timed.
    threads: number of threads of each side.
    seed: of logits, embeddings and the order of the sides.
    """

    vocab: int = 151_936
    hidden: int = 2048
    batch: int = 1
    regimes: Sequence[str] = ("certified",)
    temperatures: Sequence[float] = ()
    options: TopWOptions = field(default_factory=TopWOptions)
    geom_scale: float = 1.0
    logits: Path | None = None
    neighbour_bound: bool = False
    peers: Sequence[str] = ()
    authors: Path | None = None
    genai_python: Path | None = None
    rounds: int = 40
    threads: int = 1
    seed: int = 0


def run(request: SamplerRequest, progress: Progress = SILENT) -> Report:
    """Compare the kept sets of all implementations of Top-W with the reference's, then time all sides in turn.

    Raises ParameterError for numbers out of range and for logits that cannot be read, BenchmarkError for a named side
    that is missing, and for a side that dies or differs from the reference.
    """
    cases = make_cases(request.regimes, request.temperatures, request.geom_scale)
    given = None if request.logits is None else read_logits(request.logits)
    logits = [given if given is not None else make_logits(case.regime, request.vocab, request.batch, request.seed)
              for case in cases]  # fmt: skip
    batch, vocab = logits[0].shape
    with tempfile.TemporaryDirectory(prefix="topw-bench-") as name:
        folder = Path(name)
        for index, rows in enumerate(logits):
            np.save(folder / f"logits-{index}.npy", rows)
        present, absent = choose(sides(request, folder, cases), request.peers, ("hf", "genai"))
        # The authors' file cannot be installed, so the side is not listed as left out.
        absent = [side for side in absent if side.name != "authors"]
        machine = this_machine()
        if any(side.python or "genai" in side.name for side in present):
            write_empty_model(folder / "genai", vocab, request.threads)
        progress.say("Preparing logits, embeddings and sides")
        agreements: list[dict[str, Any]] = []
        times: list[Times] = []
        with start_workers(present, request.threads, progress) as workers:
            own = [side.name for side in present if side.worker == samplers.__file__]
            for index, case in enumerate(cases):
                if own:
                    progress.say(f"Comparing kept sets: {case.label}")
                    agreements.append(workers[own[0]].call("check", case=index, sides=own))
            total = len(cases) * len(present) * (request.rounds + _WARMUP_ROUNDS)
            with progress.bar(total, "step") as advance:
                for index in range(len(cases)):
                    calls = {name: partial(workers[name].call, "time", side=name, case=index) for name in workers}
                    seconds = interleave(calls, request.rounds, _WARMUP_ROUNDS, seed=request.seed, advance=advance)
                    times.append(Times(present, seconds))
    instructions = _instruction_set() if any(side.name == "native" for side in present) else None
    native = f", native with {instructions}" if instructions else ""
    lines = [f"{machine}; {count_text(request.threads, 'thread')}, {count_text(request.rounds, 'round')}{native}"]
    geometry = f"metric {request.options.metric}"
    if request.options.metric != "uniform":
        geometry += f", d = {request.hidden:,}" + (", neighbour bound" if request.neighbour_bound else "")
    results, panels = [], []
    for case, rows_of_case, agreement in zip(cases, times, agreements or [{}] * len(cases), strict=True):
        size = f"{case.label}: {vocab:,} tokens"
        lines += [f"\n{size}, {count_text(batch, 'row')}, {geometry}", f"{agreement.get('sentence', '')}\n"]
        header = ("side", "gives", "median (quartiles)", "x numpy.max", f"x {rows_of_case.reference.label}")
        lines.append(table(header, [_row(side, rows_of_case) for side in present], left=2))
        panels.append(_panel(rows_of_case, size if batch == 1 else f"{size}, {batch} rows"))
        results.append({
            **asdict(case),
            "label": case.label,
            "batch": batch,
            "vocab": vocab,
            "agreement": agreement,
            "sides": {
                side.name: {
                    "seconds": list(rows_of_case.seconds[side.name]),
                    "spread": asdict(rows_of_case.spread(side.name)),
                    "ratio_to_ours": rows_of_case.ratio_json(side.name),
                }
                for side in present
            },
        })  # fmt: skip
    note = f"Medians; whiskers are quartiles. {machine}."
    return Report(
        benchmark="sampler",
        request=request,
        machine=machine,
        lines=lines,
        results={"instruction_set": instructions, "cases": results},
        draw=lambda path: draw_panels(path, panels, "one step", note),
        absent=absent,
    )


def sides(request: SamplerRequest, folder: Path, cases: Sequence[Case]) -> list[Side]:
    """Every side, in the order of the table. folder: has the logits of the cases, for the workers."""
    settings = {
        "folder": str(folder),
        "cases": [asdict(case) for case in cases],
        "options": asdict(request.options),
        "hidden": request.hidden,
        "neighbour_bound": request.neighbour_bound,
        "authors": None if request.authors is None else str(request.authors),
        "seed": request.seed,
    }
    genai = {
        "task": "sample",
        "folder": str(folder),
        "temperatures": [case.parameters["temperature"] for case in cases],
        "sides": {f"genai-{name}": search for name, search in SEARCHES.items()},
    }
    every = []
    for name, label, kind, gives, needs in _SIDES:
        is_genai = name.startswith("genai-")
        every.append(
            Side(
                name=name,
                label=label,
                kind=kind,
                gives=gives,
                worker=FOLDER / "genai.py" if is_genai else samplers.__file__,
                settings=genai if is_genai else settings,
                python=request.genai_python if is_genai else None,
                why_not=_why_not(name, needs, request),
            )
        )
    return every


def _why_not(name: str, needs: Sequence[str], request: SamplerRequest) -> str | None:
    if name == "authors" and request.authors is None:
        return "without its file: give --authors PATH/TO/logit_processor_w1.py"
    is_genai = name.startswith("genai-")
    if is_genai and request.genai_python is None and not install.is_importable("onnxruntime_genai"):
        return "not installed: pip install onnxruntime-genai, or give an environment's Python with --genai-python"
    if name == "native" and (why_no_library := why_no_native_library()) is not None:
        return why_no_library
    if not all(map(install.is_importable, needs)):
        return f"not installed: {install.install_command('export')}"
    return None


def _instruction_set() -> str | None:
    from topw_deploy.plugins import library

    path = library.library_path()
    return None if path is None else library.load(path).instruction_set


def _row(side: Side, times: Times) -> tuple[str, ...]:
    ratios = [
        significant(times.ratio(side.name, other)) if other in times else ""
        for other in (_YARDSTICK, times.reference.name)
    ]
    return side.label, side.gives, duration(*times.spread(side.name).ends), *ratios


def _panel(times: Times, subtitle: str) -> Panel:
    ours = times.reference.name
    title = f"A Top-W step takes {duration(times.spread(ours).median)}"
    if _YARDSTICK in times:
        title += f" ({significant(times.ratio(ours, _YARDSTICK), 2)}x one numpy.max)"
    factors = {label: times.ratio(name) for name, label in _COMPARED.items() if name in times}

    def text(side: Side) -> str:
        ratio = f"   {significant(times.ratio(side.name), 2)}x ours" if side.kind == "peer" else ""
        return duration(times.spread(side.name).median) + ratio

    return times.panel(subtitle, f"{title}: {comparison(factors)}" if factors else title, text)


def write_empty_model(folder: Path, vocab: int, threads: int) -> None:
    """Write a model without weights for onnxruntime-genai, which cannot sample without a model.

    It is a one-layer decoder of width 1 whose logits are 0. The keys and values of a token are its id, so that the
    cache has the right shapes.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, kind: int, *shape: str | int) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Concat", ["shape", "vocab"], ["wide"], axis=0),
        helper.make_node("Expand", ["zero", "wide"], ["logits"]),
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "axes"], ["new"]),
    ]
    past, present = [], []
    for part in ("key", "value"):
        before, after = f"past_key_values.0.{part}", f"present.0.{part}"
        nodes.append(helper.make_node("Concat", [before, "new"], [after], axis=2))
        past.append(tensor(before, TensorProto.FLOAT, "batch", 1, "past", 1))
        present.append(tensor(after, TensorProto.FLOAT, "batch", 1, "total", 1))
    ids = tensor("input_ids", TensorProto.INT64, "batch", "new")
    mask = tensor("attention_mask", TensorProto.INT64, "batch", "total")
    constants = {"vocab": np.array([vocab]), "axes": np.array([1, 3]), "zero": np.zeros(1, np.float32)}
    graph = helper.make_graph(
        nodes,
        "zero_logits",
        [ids, mask, *past],
        [tensor("logits", TensorProto.FLOAT, "batch", "new", vocab), *present],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    ones = ("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    states = {
        when: {f"{when}_{part}_names": f"{prefix}.%d.{part}" for part in ("key", "value")}
        for when, prefix in (("past", "past_key_values"), ("present", "present"))
    }
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "provider_options": []},
        "filename": "model.onnx",
        **dict.fromkeys(ones, 1),
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **states["past"]},
        "outputs": {"logits": "logits", **states["present"]},
    }
    model = {"type": "llama", "vocab_size": vocab, "context_length": 64, "bos_token_id": 0, "eos_token_id": vocab - 1,
             "pad_token_id": 0, "decoder": decoder}  # fmt: skip
    config = {"model": model, "search": {"max_length": 64, "past_present_share_buffer": False}}
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "model.onnx"
    )
    (folder / "genai_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
