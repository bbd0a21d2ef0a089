"""`topw bench sampler`: one sampling step, from logits to a token, of Top-W and of every other installed sampler.

Measured: seconds per step, the mean over about 2 ms of calls on the same logits (`samplers`, and `peers` for
onnxruntime-genai). Before that, every implementation of Top-W must keep the reference's tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy import install
from topw_deploy.errors import ParameterError
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import TopWOptions, as_float32
from topw_deploy.text import count_text
from topw_lab.bench import samplers
from topw_lab.bench.logits import Logits, make_logits
from topw_lab.bench.measure import interleave
from topw_lab.bench.sides import (
    MIN_P,
    PEERS,
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
from topw_lab.tables import duration, significant

REGIMES: Mapping[str, tuple[tuple[float, ...], Mapping[str, float]]] = {
    # Few candidates, like nearly all steps of a language model.
    "certified": ((1.0, 2.0), {}),
    # A hundred tokens in the kept set, and thousands in the warm start.
    "flat": ((2.0,), {}),
    # Distances decide among all tokens of the pool. The warm start is a third of the pool.
    "uncertified": ((2.0,), {"lam": 1.0, "init_top_p": 0.5}),
}
"""Kind of logits -> (default temperatures, parameters that differ from the defaults)."""

_WARMUP_ROUNDS = 2
_YARDSTICK = "max"
_COMPARED = {"authors": "the authors' code", "hf-top-p": "transformers' top-p",
             "genai-top-p": "onnxruntime-genai's top-p"}  # fmt: skip
_EXPORTER, _TORCH = ("onnx_ir", "onnxscript"), ("torch", "transformers")
_SIDES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("native", "Top-W native, onnxruntime op", "ours", _EXPORTER),
    ("graph", "Top-W graph", "ours", _EXPORTER),
    ("torch", "Top-W torch, kept set only", "ours", ("torch",)),
    ("authors", "Top-W, authors' processor, kept set only", "peer", _TORCH),
    ("hf-top-p", f"transformers top-p {TOP_P}, kept set only", "peer", _TORCH),
    ("hf-top-k", f"transformers top-k {TOP_K}, kept set only", "peer", _TORCH),
    ("hf-min-p", f"transformers min-p {MIN_P}, kept set only", "peer", _TORCH),
    ("genai-top-p", f"onnxruntime-genai top-p {TOP_P}", "peer", ("onnx",)),
    ("genai-top-k", f"onnxruntime-genai top-k {TOP_K}", "peer", ("onnx",)),
    ("max", "numpy.max", "yardstick", ()),
    ("argmax", "onnxruntime ArgMax", "yardstick", ("onnx",)),
)
"""(name, label, kind, modules of [export] that it needs), in the order of the table."""


def run(
    *,
    regimes: Sequence[str] = ("certified",),
    temperatures: Sequence[float] = (),
    vocab: int = 151_936,
    hidden: int = 2048,
    batch: int = 1,
    options: TopWOptions | None = None,
    geom_scale: float = 1.0,
    logits: Path | None = None,
    neighbour_bound: bool = False,
    peers: Sequence[str] = (),
    authors: Path | None = None,
    genai_python: Path | None = None,
    rounds: int = 40,
    threads: int = 1,
    seed: int = 0,
    progress: Progress = SILENT,
) -> Report:
    """Compare the kept sets of all implementations of Top-W with the reference's, then time all sides in turn.

    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.
    vocab: width of the logits.
    hidden: width of the embeddings.
    batch: number of sequences per step.
    options, geom_scale: of Top-W.
    logits: a .npy file, whose shape replaces `vocab` and `batch`; None for random logits.
    neighbour_bound: whether the neighbour bound is computed, for the tokens of the pools.
    peers: names of sides; empty for all.
    authors: the file with the authors' logits processor.
    genai_python: interpreter of an environment with onnxruntime-genai.
    threads: number of threads of each side.
    seed: of logits, embeddings and the order of the sides.

    Raises ParameterError for numbers out of range and for logits that cannot be read, BenchmarkError for a named side
    that is missing, and for a side that dies or differs from the reference.
    """
    choices = asdict(options or TopWOptions())
    settings = {"regimes": regimes, "vocab": vocab, "hidden": hidden, "batch": batch, "options": choices,
                "logits": logits, "neighbour_bound": neighbour_bound, "rounds": rounds, "threads": threads,
                "seed": seed}  # fmt: skip
    cases = [
        (regime, asdict(as_float32({**REGIMES[regime][1], "temperature": temperature, "geom_scale": geom_scale})))
        for regime in regimes
        for temperature in temperatures or REGIMES[regime][0]
    ]
    read = None if logits is None else read_logits(logits)
    with tempfile.TemporaryDirectory(prefix="topw-bench-") as folder:
        for index, (regime, _) in enumerate(cases):
            values = make_logits(regime, vocab, batch, seed) if read is None else read
            batch, vocab = values.shape
            np.save(f"{folder}/logits-{index}.npy", values)
        ours = {"folder": folder, "cases": [case for _, case in cases], "options": choices, "hidden": hidden,
                "seed": seed, "neighbour_bound": neighbour_bound, "authors": authors and str(authors)}  # fmt: skip
        present, absent = choose(_sides(ours, authors is not None, genai_python), peers)
        report = Report("sampler", settings, absent, "one step")
        if any(side.worker == PEERS for side in present):
            write_empty_model(Path(folder, "genai"), vocab, threads)
        progress.say("Preparing logits, embeddings and sides")
        own = [side.name for side in present if side.worker != PEERS]
        with (
            start_workers(present, threads, progress) as workers,
            progress.bar(len(cases) * len(present) * (rounds + _WARMUP_ROUNDS), "step") as advance,
        ):
            for index, (regime, case) in enumerate(cases):
                agreement = workers[own[0]].call("check", case=index, sides=own) if own else {"sentence": ""}
                calls = {name: partial(workers[name].call, "time", side=name, case=index) for name in workers}
                seconds = interleave(calls, rounds, _WARMUP_ROUNDS, seed=seed, advance=advance)
                title = f"{regime}, T = {case['temperature']:g}: {vocab:,} tokens, {count_text(batch, 'sequence')}"
                _add_results(report, title, Times(present, seconds), {"parameters": case, "agreement": agreement})
    return report


def _sides(ours: Mapping[str, Any], has_authors: bool, genai_python: Path | None) -> list[Side]:
    """Every side. ours: settings of `samplers.start`."""
    genai = {
        "task": "sample",
        "folder": ours["folder"],
        "temperatures": [case["temperature"] for case in ours["cases"]],
        "sides": {f"genai-{name}": search for name, search in SEARCHES.items()},
    }
    sides = []
    for name, label, kind, needs in _SIDES:
        is_genai, why_not = name.startswith("genai-"), None
        if is_genai and genai_python is None and not install.is_importable("onnxruntime_genai"):
            why_not = (
                "not installed: pip install onnxruntime-genai, or give an environment's Python with --genai-python"
            )
        elif not all(map(install.is_importable, needs)):
            why_not = f"not installed: {install.install_command('export')}"
        if name == "native":
            why_not = why_no_native_library() or why_not
        if name != "authors" or has_authors:
            sides.append(
                Side(name=name, label=label, kind=kind, worker=PEERS if is_genai else samplers.__file__,
                     settings=genai if is_genai else ours, python=genai_python if is_genai else None, why_not=why_not)
            )  # fmt: skip
    return sides


def _add_results(report: Report, title: str, times: Times, facts: dict[str, Any]) -> None:
    """Add the sides of one case to the report."""
    ours, has_yardstick = times.reference, _YARDSTICK in times.seconds

    def ratio(side: Side, to: str | None = None) -> str:
        return significant(times.ratio(side.name, to).median)

    header = ("side", "median (quartiles)", "x numpy.max", f"x {ours.label}")
    rows = [
        (side.label, duration(*times.spread(side.name).ends), ratio(side, _YARDSTICK) if has_yardstick else "",
         ratio(side))
        for side in times.sides
    ]  # fmt: skip
    report.add_table(f"{title}\n{facts['agreement']['sentence']}", header, rows)
    report.runs.append({"title": title, **facts, **times.as_dict()})
    finding = f"A Top-W step takes {duration(times.spread(ours.name).median)}"
    if has_yardstick:
        finding += f" ({significant(times.ratio(ours.name, _YARDSTICK).median, 2)}x one numpy.max)"

    def text(side: Side) -> str:
        return duration(times.spread(side.name).median) + (f"   {ratio(side)}x ours" if side.kind == "peer" else "")

    report.panels.append(times.panel(title, finding + times.comparison(_COMPARED), text))


def read_logits(path: Path) -> Logits:
    """Read logits from a .npy file, [V] or [B, V], as float32 [B, V]. Raises ParameterError for other files."""
    try:
        logits = np.atleast_2d(np.load(path, allow_pickle=False)).astype(np.float32)
        usable = logits.ndim == 2 and logits.size > 0 and bool(np.isfinite(logits.max(axis=1)).all())
    except (OSError, ValueError, EOFError):
        usable = False
    if not usable:
        raise ParameterError(f"{path} is not a .npy file of logits, [V] or [B, V], without NaN or +infinity.")
    return np.ascontiguousarray(logits)


_EMPTY_MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
zero_logits (int64[batch, new] input_ids, int64[batch, total] attention_mask,
             float[batch, 1, past, 1] past_key_0, float[batch, 1, past, 1] past_value_0)
    => (float[batch, new, VOCAB] logits, float[batch, 1, total, 1] key_0, float[batch, 1, total, 1] value_0)
<int64[1] vocab = {VOCAB}, int64[2] axes = {1, 3}, float[1] zero = {0}> {
    shape = Shape(input_ids)
    wide = Concat<axis = 0>(shape, vocab)
    logits = Expand(zero, wide)
    numbers = Cast<to = 1>(input_ids)
    states = Unsqueeze(numbers, axes)
    key_0 = Concat<axis = 2>(past_key_0, states)
    value_0 = Concat<axis = 2>(past_value_0, states)
}
"""


def write_empty_model(folder: Path, vocab: int, threads: int) -> None:
    """Write a model without weights for onnxruntime-genai, which cannot sample without a model.

    It is a one-layer decoder of width 1 whose logits are 0. The keys and values of a token are its id, so that the
    cache has the right shapes.
    """
    import onnx
    import onnx.parser

    ones = ("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "provider_options": []},
        "filename": "model.onnx",
        **dict.fromkeys(ones, 1),
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", "past_key_names": "past_key_%d",
                   "past_value_names": "past_value_%d"},
        "outputs": {"logits": "logits", "present_key_names": "key_%d", "present_value_names": "value_%d"},
    }  # fmt: skip
    model = {"type": "llama", "vocab_size": vocab, "context_length": 64, "bos_token_id": 0, "eos_token_id": vocab - 1,
             "pad_token_id": 0, "decoder": decoder}  # fmt: skip
    config = {"model": model, "search": {"max_length": 64, "past_present_share_buffer": False}}
    folder.mkdir()
    onnx.save(onnx.parser.parse_model(_EMPTY_MODEL.replace("VOCAB", str(vocab))), folder / "model.onnx")
    (folder / "genai_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
