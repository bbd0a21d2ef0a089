"""`topw bench sampler`: one sampling step, from logits to a token, of Top-W and of every other installed sampler.

Measured: seconds per step, the mean over about 2 ms of calls on the same logits. Before that, every implementation of
Top-W must keep the reference's tokens. This file is also the worker of all samplers but onnxruntime-genai's (`peers`):
a process of its own, because BLAS libraries fix their thread count when they are loaded, and native code may crash.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.sampling import Geometry, RuleParameters, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop, candidate_pool
from topw_deploy.text import count_text
from topw_lab.bench import base
from topw_lab.bench.logits import Logits, make_logits
from topw_lab.tables import duration, significant

if TYPE_CHECKING:
    import onnxruntime as ort

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
_EXPORTER, _TORCH = ("onnx_ir", "onnxscript"), ("torch", "transformers")
_SIDES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("native", "Top-W native, onnxruntime op", "ours", _EXPORTER),
    ("graph", "Top-W graph", "ours", _EXPORTER),
    ("torch", "Top-W torch, kept set only", "ours", ("torch",)),
    ("authors", "Top-W, authors' processor, kept set only", "peer", _TORCH),
    ("hf-top-p", f"transformers top-p {base.TOP_P}, kept set only", "peer", _TORCH),
    ("hf-top-k", f"transformers top-k {base.TOP_K}, kept set only", "peer", _TORCH),
    ("hf-min-p", f"transformers min-p {base.MIN_P}, kept set only", "peer", _TORCH),
    ("genai-top-p", f"onnxruntime-genai top-p {base.TOP_P}", "peer", ("onnx",)),
    ("genai-top-k", f"onnxruntime-genai top-k {base.TOP_K}", "peer", ("onnx",)),
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
    metric: str = "mahalanobis",
    alt_iters: int = 3,
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
) -> base.Report:
    """Compare the kept sets of all implementations of Top-W with the reference's, then time all sides in turn.

    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.
    vocab: width of the logits.
    hidden: width of the embeddings.
    batch: number of sequences per step.
    metric, alt_iters, geom_scale: of Top-W.
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
    settings = {name: value for name, value in locals().items() if name != "progress"}
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
        ours = {"folder": folder, "cases": [case for _, case in cases], "hidden": hidden, "seed": seed,
                "options": asdict(TopWOptions(metric=metric, alt_iters=alt_iters)),
                "neighbour_bound": neighbour_bound, "authors": authors and str(authors)}  # fmt: skip
        present, absent = base.choose(_sides(ours, authors is not None, genai_python), peers)
        report = base.Report("sampler", settings, absent, "one step")
        if any(side.worker == base.PEERS for side in present):
            write_empty_model(Path(folder, "genai"), vocab, threads)
        progress.say("Preparing logits, embeddings and sides")
        own = [side.name for side in present if side.worker != base.PEERS]
        with (
            base.start_workers(present, threads, progress) as workers,
            progress.bar(len(cases) * len(present) * (rounds + _WARMUP_ROUNDS), "step") as advance,
        ):
            for index, (regime, case) in enumerate(cases):
                agreement = workers[own[0]].call("check", case=index, sides=own) if own else {"sentence": ""}
                calls = {name: partial(workers[name].call, "time", side=name, case=index) for name in workers}
                seconds = base.interleave(calls, rounds, _WARMUP_ROUNDS, seed=seed, advance=advance)
                title = f"{regime}, T = {case['temperature']:g}: {vocab:,} tokens, {count_text(batch, 'sequence')}"
                _add_results(report, title, base.Times(present, seconds), {"parameters": case, "agreement": agreement})
    return report


def _sides(ours: Mapping[str, Any], has_authors: bool, genai_python: Path | None) -> list[base.Side]:
    """Every side. ours: settings of `start`."""
    genai = {
        "task": "sample",
        "folder": ours["folder"],
        "temperatures": [case["temperature"] for case in ours["cases"]],
        "sides": {f"genai-{name}": search for name, search in base.SEARCHES.items()},
    }
    no_genai = "not installed: pip install onnxruntime-genai, or give an environment's Python with --genai-python"
    has_genai = genai_python is not None or install.is_importable("onnxruntime_genai")
    sides = []
    for name, label, kind, needs in _SIDES:
        is_genai, why_not = name.startswith("genai-"), None
        if not all(map(install.is_importable, needs)):
            why_not = f"not installed: {install.install_command('export')}"
        if is_genai and not has_genai:
            why_not = no_genai
        if name == "native":
            why_not = base.why_no_native_library() or why_not
        if name != "authors" or has_authors:
            worker, settings, python = (base.PEERS, genai, genai_python) if is_genai else (__file__, ours, None)
            sides.append(base.Side(name=name, label=label, kind=kind, worker=worker, settings=settings, python=python,
                              why_not=why_not))  # fmt: skip
    return sides


def _add_results(report: base.Report, title: str, times: base.Times, facts: dict[str, Any]) -> None:
    """Add the sides of one case to the report."""
    ours, has_yardstick = times.reference, _YARDSTICK in times.seconds

    def ratio(side: base.Side, to: str | None = None) -> str:
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

    def text(side: base.Side) -> str:
        return duration(times.spread(side.name).median) + (f"   {ratio(side)}x ours" if side.kind == "peer" else "")

    report.panels.append(times.panel(title, finding, text))


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


Parameters = Mapping[str, float]
"""Top-W's parameters of one case, rounded to float32."""
Call = Callable[[], Any]

TABLE_FILE = "table.bin"
_BLOCK = 1024  # tokens of the embedding table that are processed at once
_SLACK = 1e-3  # relative; far above the rounding error of float32 on random points
_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many
_WARPERS = {"hf-top-p": ("TopPLogitsWarper", base.TOP_P), "hf-top-k": ("TopKLogitsWarper", base.TOP_K),
            "hf-min-p": ("MinPLogitsWarper", base.MIN_P)}  # fmt: skip


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the embeddings. Returns `time` and `check` of SamplerWorker."""
    worker = SamplerWorker(settings)
    return {"time": worker.time, "check": worker.check}


@dataclass(frozen=True)
class Sampler:
    """A sampler that can be timed.

    prepare: takes a case and logits [B, V], and returns a call that makes a step on them, as often as it is called.
    keep_mask: the kept set of each sequence, bool [B, V], which steps do not report, because that takes time. None if
        the sampler is not Top-W.
    """

    prepare: Callable[[Parameters, Logits], Call]
    keep_mask: Callable[[Parameters, Logits], ArrayLike] | None = None


class SamplerWorker:
    """The samplers of this environment, for B sequences, V tokens and d coordinates. The settings:

    folder: has the logits, float32 [B, V], of each case in logits-0.npy and so on. Embeddings and models are written
        to it.
    cases: Top-W's parameters of each case.
    options: TopWOptions.
    threads: number of threads of every sampler.
    hidden, neighbour_bound, seed: as in `run`.
    authors: the authors' file; None without.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.folder, self.cases, self.threads = Path(settings["folder"]), settings["cases"], settings["threads"]
        self.options, self.authors = TopWOptions(**settings["options"]), settings["authors"]
        self.logits = [np.load(self.folder / f"logits-{index}.npy") for index in range(len(self.cases))]
        batch, vocab = self.logits[0].shape
        self.embeddings, self.geometry, self.bound = None, Geometry.uniform(), None
        if self.options.metric != "uniform":
            self.embeddings = write_table(self.folder, vocab, settings["hidden"], settings["seed"])
            self.geometry = Geometry.from_embeddings(self.embeddings, self.options.metric)
            if settings["neighbour_bound"]:
                self.bound = pool_neighbour_bound(self.geometry, self.logits, self.options.top_m)
        self.uniform = np.random.default_rng([settings["seed"], 2]).random((batch,), np.float32)
        self._sampler, self._step = cache(self.make_sampler), cache(self._prepare_step)

    def time(self, side: str, case: int) -> float:
        """Seconds per step, over about 2 ms of steps. CPU caches are warm, as they are after a model's last matmul."""
        return base.seconds(*self._step(side, case))

    def _prepare_step(self, side: str, case: int) -> tuple[Call, int]:
        """A call that makes a step, and the number of calls per sample."""
        call = self._sampler(side).prepare(self.cases[case], self.logits[case])
        call()
        return call, max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(base.seconds(call), 1e-9))))

    def check(self, case: int, sides: Sequence[str]) -> dict[str, Any]:
        """Compare kept sets with the reference's, and say so in a sentence.

        Raises BenchmarkError if a side other than the authors', which always uses cosine, differs.
        """
        references = [
            crop(one, TopWParameters(**self.cases[case]), self.options, self.geometry) for one in self.logits[case]
        ]
        certified, sizes = sum(one.certified for one in references), [len(one.kept) for one in references]
        least, most = min(sizes), max(sizes)
        kept = count_text(least, "token") if least == most else f"{least} to {most} tokens"
        parts = [f"{count_text(len(references), 'sequence')}, {certified} certified, {kept} kept"]
        counts = {}
        for side in sides:
            keep_mask = self._sampler(side).keep_mask
            if keep_mask is not None:
                mask = keep_mask(self.cases[case], self.logits[case])
                same, ties = compare_kept_sets(side, mask, references, exact=side != "authors")
                counts[side] = {"same": same, "ties": ties}
                parts.append(f"{side} keeps the reference's set on {same}" + (f", ties on {ties}" if ties else ""))
        return {"sentence": "; ".join(parts), "certified": certified, "kept": sizes, "sides": counts}

    def make_sampler(self, name: str) -> Sampler:
        """Make the sampler of side `name`, and import its libraries."""
        if name in ("native", "graph"):
            return self.graph_sampler(native=name == "native")
        if name == "argmax":
            return self.argmax_sampler()
        if name == "max":  # every sampler must read the logits
            return Sampler(lambda _, logits: lambda: np.max(logits, axis=1) if len(logits) > 1 else np.max(logits[0]))
        import torch

        torch.set_num_threads(self.threads)
        if name in _WARPERS:
            return transformers_warper(*_WARPERS[name])
        return self.authors_sampler() if name == "authors" else self.torch_sampler()

    def graph_sampler(self, *, native: bool) -> Sampler:
        """Top-W in onnxruntime: a sampler-only model. native: the native operator runs instead of the function."""

        def open_model(with_keep_mask: bool) -> ort.InferenceSession:
            path = self.write_model(with_keep_mask=with_keep_mask)
            return open_session(path, self.threads, native=native)

        session = open_model(with_keep_mask=False)

        def keep_mask(case: Parameters, logits: Logits) -> ArrayLike:
            # A model of its own, because an output of the mask takes time.
            mask: ArrayLike = open_model(with_keep_mask=True).run(["keep_mask"], self.session_inputs(case, logits))[0]
            return mask

        return Sampler(lambda case, logits: bind_run(session, self.session_inputs(case, logits)), keep_mask)

    def torch_sampler(self) -> Sampler:
        """Top-W in PyTorch: `crop_rows` on the CPU, for all rows at once."""
        import torch

        from topw_deploy.sampling.torch import TensorGeometry, crop_rows

        geometry = None
        if self.embeddings is not None:
            geometry = TensorGeometry.from_embeddings(torch.from_numpy(self.embeddings), self.options.metric)

        def prepare(case: Parameters, logits: Logits) -> Call:
            scores, parameters = torch.from_numpy(logits), TopWParameters(**case)
            return lambda: crop_rows(scores, parameters, self.options, geometry).keep_mask

        return Sampler(prepare, lambda case, logits: prepare(case, logits)().numpy())

    def authors_sampler(self) -> Sampler:
        """The user's copy of the logits processor of arashgholami/top-w-decoding, with the parameters of the case.

        The processor always computes cosine distances, for one row at a time. It is made once, because that takes long.
        """
        import torch

        if self.embeddings is None:
            raise BenchmarkError("authors needs embeddings, but the metric is uniform; choose another --metric.")

        def parameters_of(case: Parameters) -> dict[str, float]:
            return {
                **{name: case[name] for name in ("init_top_p", "geom_scale", "beta")},
                "selection_temperature": case["selection_temperature"] or case["temperature"],
                "top_m": self.options.top_m,
                "alt_iters": self.options.alt_iters,
                "lam_fixed": case["lam"],
            }

        make, table = base.load_processor(Path(str(self.authors))), np.asarray(self.embeddings)
        processor = make(table, print_params=False, print_kept=False, **parameters_of(self.cases[0]))

        def prepare(case: Parameters, logits: Logits) -> Call:
            rows = [torch.from_numpy(row[None]) for row in logits]

            def warp() -> list[Any]:
                vars(processor).update(parameters_of(case))
                return [processor(None, row) for row in rows]

            return warp

        return Sampler(prepare, lambda case, logits: [np.isfinite(row[0].numpy()) for row in prepare(case, logits)()])

    def argmax_sampler(self) -> Sampler:
        """onnxruntime's ArgMax, as a yardstick."""
        import onnx.parser

        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]> argmax (float[batch, vocab] logits) => (int64[batch, 1] token)'
            "{ token = ArgMax<axis = 1>(logits) }"
        )
        session = open_session(model.SerializeToString(), self.threads)
        return Sampler(lambda _case, logits: bind_run(session, {"logits": logits}))

    def session_inputs(self, case: Parameters, logits: Logits) -> dict[str, np.ndarray]:
        """The inputs of the sampler-only model by name: no edits, no masks, and Top-W as the rule of every sequence."""
        batch = len(logits)
        empty = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32, "allowed": np.int32}
        columns = {name: np.full(batch, case[name], np.float32) for name in PARAMETER_NAMES}
        edits = {name: np.zeros((batch, 0), dtype) for name, dtype in empty.items()}
        return {
            "logits": logits,
            "uniform": self.uniform,
            **edits,
            **columns,
            **rule_arrays([RuleParameters()] * batch),
        }

    def write_model(self, *, with_keep_mask: bool) -> Path:
        """Write the sampler-only model to `self.folder`, unless it exists. Returns its path. Models share one table."""
        path = self.folder / f"sampler{'-mask' if with_keep_mask else ''}.onnx"
        if path.exists():
            return path
        import onnx_ir as ir

        from topw_deploy.export.embedding import plain_gather
        from topw_deploy.export.sampler.attach import BOUND_NAME
        from topw_deploy.export.sampler.node import SamplerSpec
        from topw_deploy.export.sampler_only import sampler_model

        vocab, table = self.logits[0].shape[1], self.embeddings
        spec = SamplerSpec(
            options=self.options,
            vocab_size=vocab,
            embedding=None if table is None else plain_gather(*table.shape),
            hidden_size=None if table is None else table.shape[1],
            with_keep_mask=with_keep_mask,
        )
        model = sampler_model(spec, table, self.geometry)
        constants = model.graph.initializers
        if table is not None:
            shape = ir.Shape(table.shape)
            constants["topw.embedding"].const_value = ir.ExternalTensor(
                TABLE_FILE, 0, table.nbytes, ir.DataType.FLOAT, shape=shape, name="topw.embedding", base_dir=self.folder
            )
        if self.bound is not None:
            value = constants[BOUND_NAME]
            value.const_value, value.shape = ir.tensor(self.bound, name=BOUND_NAME), ir.Shape([vocab])
        ir.save(model, path)
        return path


def transformers_warper(name: str, value: float) -> Sampler:
    """A warper of transformers, on logits divided by the temperature as in `generate`.

    Only the warper is timed, because the rest of `generate` is the same for all.
    """
    import torch
    from transformers.generation import logits_process

    warp: Any = getattr(logits_process, name)(value)

    def prepare(case: Parameters, logits: Logits) -> Call:
        scores = torch.from_numpy(logits) / max(case["temperature"], 1e-5)
        return lambda: warp(None, scores)

    return Sampler(prepare)


def open_session(model: Path | bytes, threads: int, *, native: bool = False) -> ort.InferenceSession:
    """Open a session on the CPU. native: register the native operator."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    if native:
        from topw_deploy.plugins.library import library_path

        options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def bind_run(session: ort.InferenceSession, feed: Mapping[str, np.ndarray]) -> Call:
    """A call that runs the session. Inputs and outputs are bound once, as in the runtime."""
    import onnxruntime as ort

    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    for node in session.get_inputs():
        binding.bind_ortvalue_input(node.name, values[node.name])
    for node in session.get_outputs():
        binding.bind_output(node.name)
    run, io_binding = session._sess.run_with_iobinding, binding._iobinding

    def call() -> Mapping[str, ort.OrtValue]:
        run(io_binding, None)
        return values  # keeps the inputs alive, which the binding does not

    return call


def write_table(folder: Path, vocab: int, hidden: int, seed: int) -> NDArray[np.float32]:
    """Write random embeddings, float32 [vocab, hidden], to `folder / TABLE_FILE`. Returns them memory-mapped."""
    rng = np.random.default_rng([seed, 1])
    with (folder / TABLE_FILE).open("wb") as file:
        for start in range(0, vocab, _BLOCK):
            file.write(rng.standard_normal((min(_BLOCK, vocab - start), hidden), dtype=np.float32).tobytes())
    return np.memmap(folder / TABLE_FILE, np.float32, "c", shape=(vocab, hidden))  # torch refuses read-only arrays


def pool_neighbour_bound(geometry: Geometry, logits: Sequence[Logits], top_m: int) -> NDArray[np.float32]:
    """The neighbour bound, float32 [V], for the tokens in the pools of `logits`; 0, a valid bound, for all others.

    Samplers read only the entries of these tokens, and these entries cost pool x V distances instead of V x V.
    """
    vocab = logits[0].shape[1]
    pools = [candidate_pool(one.astype(np.float64), top_m)[0] for batch in logits for one in batch]
    ids = np.unique(np.concatenate(pools))
    bound = np.zeros(vocab, np.float32)
    bound[ids] = geometry.nearest_distances(ids, vocab) * (1 - _SLACK)
    return bound


def compare_kept_sets(side: str, keep_mask: ArrayLike, references: Sequence[Crop], *, exact: bool) -> tuple[int, int]:
    """Compare the kept sets, bool [B, V], with the reference's. Returns (equal sets, other sets at a tie).

    Raises BenchmarkError if an `exact` side differs beyond ties (docs/contract/graph.md, section 4).
    """
    same = ties = 0
    for place, (mask, reference) in enumerate(zip(np.asarray(keep_mask), references, strict=True)):
        different = np.setxor1d(np.flatnonzero(mask), reference.kept)
        if not len(different):
            same += 1
        elif reference.ties.allow_other_set(FLOAT32_TIES):
            ties += 1
        elif exact:
            raise BenchmarkError(
                f"{side} keeps {np.count_nonzero(mask)} tokens of sequence {place} where the reference keeps "
                f"{len(reference.kept)} ({len(different)} differ), so its time means nothing; report this with the "
                "options used."
            )
    return same, ties
