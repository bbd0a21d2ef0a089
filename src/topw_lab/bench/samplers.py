"""The samplers that `topw bench sampler` times in this environment, their logits, and their worker.

A process of its own, because BLAS libraries fix their thread count when they are loaded, and native code may crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop, candidate_pool
from topw_deploy.text import count_text
from topw_lab.bench.logits import Logits
from topw_lab.bench.measure import calls_filling, seconds
from topw_lab.bench.sides import MIN_P, TOP_K, TOP_P, load_processor

if TYPE_CHECKING:
    import onnxruntime as ort

Table = NDArray[np.float32]
Call = Callable[[], object]

REGIMES: Mapping[str, tuple[tuple[float, ...], Mapping[str, float]]] = {
    # Few candidates, like nearly all steps of a language model.
    "certified": ((1.0, 2.0), {}),
    # A hundred tokens in the kept set, and thousands in the warm start.
    "flat": ((2.0,), {}),
    # Distances decide among all tokens of the pool. The warm start is a third of the pool.
    "uncertified": ((2.0,), {"lam": 1.0, "init_top_p": 0.5}),
}
"""Regime (kind of logits) -> (default temperatures, parameters that differ from the defaults)."""

TABLE_FILE = "table.bin"
_BLOCK_ROWS = 1024  # rows of the embedding table that are processed at once
_SLACK = 1e-3  # relative; far above the rounding error of float32 on random points
_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many


@dataclass(frozen=True)
class Case:
    """A kind of logits, and Top-W's parameters that they are sampled with, rounded to float32."""

    regime: str
    parameters: Mapping[str, float]

    @property
    def label(self) -> str:
        return f"{self.regime}, T = {self.parameters['temperature']:g}"

    @property
    def top_w(self) -> TopWParameters:
        return TopWParameters(**self.parameters)


def make_cases(regimes: Sequence[str], temperatures: Sequence[float], geom_scale: float) -> list[Case]:
    """One case for each regime and temperature.

    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.

    Raises ParameterError for numbers out of range.
    """
    cases = []
    for regime in regimes:
        for temperature in temperatures or REGIMES[regime][0]:
            rounded = as_float32({**REGIMES[regime][1], "temperature": temperature, "geom_scale": geom_scale})
            cases.append(Case(regime, {name: getattr(rounded, name) for name in PARAMETER_NAMES}))
    return cases


def read_logits(path: Path) -> Logits:
    """Read logits from a .npy file, [V] or [B, V], as float32 [B, V]. Raises ParameterError for other files."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError):  # numpy's own message advises to load a pickle, which is unsafe
        raise ParameterError(f"{path} cannot be read as a .npy file of numbers; save it with numpy.save.") from None
    if loaded.ndim not in (1, 2) or 0 in loaded.shape or loaded.dtype.kind != "f":
        raise ParameterError(
            f"{path} holds {loaded.dtype} {list(loaded.shape)}, but logits must be floating point, [V] or [B, V]."
        )
    rows = np.ascontiguousarray(np.atleast_2d(loaded), np.float32)
    if not np.isfinite(rows.max(axis=1)).all() or np.isnan(rows).any():
        raise ParameterError(f"{path} has NaN, +infinity or a row without a finite logit; save other rows.")
    return rows


@dataclass(frozen=True)
class Inputs:
    """The inputs of all samplers, for B rows, V tokens and d coordinates.

    folder: the folder with TABLE_FILE, to which samplers also write their models.
    threads: number of threads of every sampler.
    logits: float32 [B, V] for each case.
    uniform: float32 [B], the uniform number of each row.
    options, geometry: of Top-W.
    embeddings: float32 [V, d]; None for the metric `uniform`.
    neighbour_bound: float32 [V]; None without a bound.
    """

    folder: Path
    threads: int
    logits: Sequence[Logits]
    uniform: NDArray[np.float32]
    options: TopWOptions
    geometry: Geometry
    embeddings: Table | None
    neighbour_bound: NDArray[np.float32] | None


@dataclass(frozen=True)
class Sampler:
    """A sampler that can be timed.

    prepare: takes a case and rows [B, V], and returns a call that makes a step on them, as often as it is called.
    kept_ids: the kept ids of each row, which steps do not report, because that takes time. None if the sampler is not
        Top-W.
    """

    prepare: Callable[[Case, Logits], Call]
    kept_ids: Callable[[Case, Logits], Sequence[ArrayLike]] | None = None


def graph_sampler(inputs: Inputs, *, native: bool) -> Sampler:
    """Top-W in onnxruntime: a sampler-only model. native: the native operator runs instead of the function."""

    def open_model(with_keep_mask: bool) -> ort.InferenceSession:
        path = write_sampler_model(inputs, with_keep_mask=with_keep_mask)
        return open_session(path, inputs.threads, native=native)

    session = open_model(with_keep_mask=False)

    def kept_ids(case: Case, logits: Logits) -> Sequence[ArrayLike]:
        # A model of its own, because an output of the mask takes time.
        (keep_mask,) = open_model(with_keep_mask=True).run(["keep_mask"], session_inputs(inputs, case, logits))
        return [np.flatnonzero(row) for row in keep_mask]

    return Sampler(lambda case, logits: bind_run(session, session_inputs(inputs, case, logits)), kept_ids)


def torch_sampler(inputs: Inputs) -> Sampler:
    """Top-W in PyTorch: `crop_rows` on the CPU, for all rows at once."""
    import torch

    from topw_deploy.sampling.torch import TensorGeometry, crop_rows

    geometry = None
    if inputs.embeddings is not None:
        path, shape = str(inputs.folder / TABLE_FILE), inputs.embeddings.shape
        table = torch.from_file(path, size=inputs.embeddings.size).view(shape)
        geometry = TensorGeometry.from_embeddings(table, inputs.options.metric)

    def keep_mask(case: Case, scores: Any) -> Any:
        return crop_rows(scores, case.top_w, inputs.options, geometry).keep_mask

    def prepare(case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits)
        return lambda: keep_mask(case, scores)

    return Sampler(
        prepare,
        lambda case, logits: [np.flatnonzero(row) for row in keep_mask(case, torch.from_numpy(logits)).numpy()],
    )


def transformers_warper(rule: str) -> Sampler:
    """A warper of transformers, on logits divided by the temperature as in `generate`.

    Only the warper is timed, because the rest of `generate` is the same for all.
    """
    import torch
    from transformers.generation import logits_process as rules

    makers = {"top-p": (rules.TopPLogitsWarper, TOP_P), "top-k": (rules.TopKLogitsWarper, TOP_K),
              "min-p": (rules.MinPLogitsWarper, MIN_P)}  # fmt: skip
    make, value = makers[rule]
    warp: Any = make(value)

    def prepare(case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits) / max(case.parameters["temperature"], 1e-5)
        return lambda: warp(None, scores)

    return Sampler(prepare)


def authors_sampler(inputs: Inputs, path: str | None) -> Sampler:
    """The user's copy of the logits processor of arashgholami/top-w-decoding, with the parameters of the case.

    The processor always computes cosine distances, for one row at a time. There is one, because its constructor takes
    long.
    """
    import torch

    if inputs.embeddings is None:
        raise BenchmarkError("authors needs embeddings, but the metric is uniform; choose another --metric.")
    processor_class = load_processor(Path(str(path)))
    made: Any = None

    def processor(case: Case) -> Any:
        nonlocal made
        parameters = {
            "selection_temperature": case.parameters["selection_temperature"] or case.parameters["temperature"],
            "top_m": inputs.options.top_m,
            "init_top_p": case.parameters["init_top_p"],
            "alt_iters": inputs.options.alt_iters,
            "geom_scale": case.parameters["geom_scale"],
            "lam_fixed": case.parameters["lam"],
            "beta": case.parameters["beta"],
        }
        if made is None:
            made = processor_class(np.asarray(inputs.embeddings), print_params=False, print_kept=False, **parameters)
        vars(made).update(parameters)
        return made

    def prepare(case: Case, logits: Logits) -> Call:
        warp, rows = processor(case), [torch.from_numpy(row[None]) for row in logits]
        return lambda: [warp(None, row) for row in rows]

    def kept_ids(case: Case, logits: Logits) -> Sequence[ArrayLike]:
        warp = processor(case)
        return [np.flatnonzero(np.isfinite(warp(None, torch.from_numpy(row[None]))[0].numpy())) for row in logits]

    return Sampler(prepare, kept_ids)


def operator_sampler(inputs: Inputs, op_type: str) -> Sampler:
    """A standard operator of onnxruntime on the logits, as a yardstick. op_type: "ArgMax" or "TopK"."""
    path = inputs.folder / f"{op_type}.onnx"
    path.write_bytes(operator_model(op_type, inputs.logits[0].shape[1], inputs.options.top_m))
    session = open_session(path, inputs.threads)
    return Sampler(lambda _case, logits: bind_run(session, {"logits": logits}))


def make_sampler(name: str, inputs: Inputs, authors: str | None = None) -> Sampler:
    """Make the sampler of side `name`, and import its libraries."""
    if name in ("native", "graph"):
        return graph_sampler(inputs, native=name == "native")
    if name in ("argmax", "topk"):
        return operator_sampler(inputs, {"argmax": "ArgMax", "topk": "TopK"}[name])
    if name == "max":  # every sampler must read the logits
        return Sampler(lambda _case, logits: lambda: np.max(logits, axis=1) if len(logits) > 1 else np.max(logits[0]))
    import torch

    torch.set_num_threads(inputs.threads)
    if name == "authors":
        return authors_sampler(inputs, authors)
    return torch_sampler(inputs) if name == "torch" else transformers_warper(name.removeprefix("hf-"))


def open_session(path: Path, threads: int, *, native: bool = False) -> ort.InferenceSession:
    """Open a session on the CPU. native: register the native operator."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    if native:
        from topw_deploy.plugins.library import library_path

        options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


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


def session_inputs(inputs: Inputs, case: Case, logits: Logits) -> dict[str, np.ndarray]:
    """The inputs of the sampler-only model by name: no edits, no masks, and Top-W as the rule of every row."""
    batch = len(logits)
    empty = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32, "allowed": np.int32}
    columns = {name: np.full(batch, case.parameters[name], np.float32) for name in PARAMETER_NAMES}
    edits = {name: np.zeros((batch, 0), dtype) for name, dtype in empty.items()}
    from topw_deploy.runtime.inputs import RuleInputs  # needs onnxruntime, which a GPU host's steps do without

    return {"logits": logits, "uniform": inputs.uniform, **edits, **columns, **RuleInputs(batch).arrays}


def write_sampler_model(inputs: Inputs, *, with_keep_mask: bool) -> Path:
    """Write the sampler-only model to `inputs.folder`, unless it exists. Returns its path. Models share one table."""
    path = inputs.folder / f"sampler{'-mask' if with_keep_mask else ''}.onnx"
    if path.exists():
        return path
    import onnx_ir as ir

    from topw_deploy.export.embedding import plain_gather
    from topw_deploy.export.sampler.attach import BOUND_NAME
    from topw_deploy.export.sampler.spec import SamplerSpec
    from topw_deploy.export.sampler_only import sampler_model

    vocab, table = inputs.logits[0].shape[1], inputs.embeddings
    spec = SamplerSpec(
        options=inputs.options,
        vocab_size=vocab,
        embedding=None if table is None else plain_gather(*table.shape),
        hidden_size=None if table is None else table.shape[1],
        with_keep_mask=with_keep_mask,
    )
    model = sampler_model(spec, table, inputs.geometry)
    constants = model.graph.initializers
    if table is not None:
        shape = ir.Shape(table.shape)
        constants["topw.embedding"].const_value = ir.ExternalTensor(
            TABLE_FILE, 0, table.nbytes, ir.DataType.FLOAT, shape=shape, name="topw.embedding", base_dir=inputs.folder
        )
    if inputs.neighbour_bound is not None:
        value = constants[BOUND_NAME]
        value.const_value, value.shape = ir.tensor(inputs.neighbour_bound, name=BOUND_NAME), ir.Shape([vocab])
    ir.save(model, path)
    return path


def operator_model(op_type: str, vocab: int, k: int) -> bytes:
    """ArgMax over the last axis of `logits` [batch, vocab], or TopK with `k`."""
    from onnx import TensorProto, helper, numpy_helper

    kinds = {"ArgMax": (TensorProto.INT64,), "TopK": (TensorProto.FLOAT, TensorProto.INT64)}[op_type]
    results = [f"result_{i}" for i in range(len(kinds))]
    constants = [numpy_helper.from_array(np.array([min(k, vocab)]), "k")] if op_type == "TopK" else []
    graph = helper.make_graph(
        [helper.make_node(op_type, ["logits", *(constant.name for constant in constants)], results, axis=1)],
        op_type,
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", vocab])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(results, kinds, strict=True)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def write_table(folder: Path, vocab: int, hidden: int, seed: int) -> Table:
    """Write random embeddings, float32 [vocab, hidden], to `folder / TABLE_FILE`. Returns them memory-mapped."""
    rng = np.random.default_rng([seed, 1])
    table = np.memmap(folder / TABLE_FILE, np.float32, "w+", shape=(vocab, hidden))
    for start in range(0, vocab, _BLOCK_ROWS):
        block = table[start : start + _BLOCK_ROWS]
        block[:] = rng.standard_normal(block.shape, dtype=np.float32)
    table.flush()
    return np.memmap(folder / TABLE_FILE, np.float32, "r", shape=(vocab, hidden))


def pool_neighbour_bound(geometry: Geometry, rows: Sequence[Logits], top_m: int) -> NDArray[np.float32]:
    """The neighbour bound, float32 [V], for the tokens in the pools of `rows`; 0, a valid bound, for all others.

    Samplers read only the entries of these tokens, and these entries cost pool x V distances instead of V x V.
    """
    vocab = rows[0].shape[1]
    ids = np.unique(
        np.concatenate([candidate_pool(row.astype(np.float64), top_m)[0] for batch in rows for row in batch])
    )
    points = geometry.features(ids).astype(np.float32)  # [n, d]
    nearest = np.full(len(ids), np.inf, np.float32)
    for start in range(0, vocab, _BLOCK_ROWS):
        others = np.arange(start, min(start + _BLOCK_ROWS, vocab))
        distances = _distance_bounds(geometry.metric, points, geometry.features(others).astype(np.float32))
        distances[ids[:, None] == others] = np.inf
        np.minimum(nearest, distances.min(axis=1), out=nearest)
    bound = np.zeros(vocab, np.float32)
    bound[ids] = np.where(np.isfinite(nearest), nearest * (1 - _SLACK), 0)
    return bound


def _distance_bounds(metric: str, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lower bounds of the distances of x [n, d] to y [m, d], float32 [n, m]. Bounds that rounding could raise are 0."""
    products = x @ y.T
    if metric == "cosine":
        distances = 1 - products
        return np.where(distances > _SLACK, distances, 0).astype(np.float32)
    sizes = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1)
    squares = sizes - 2 * products
    return np.sqrt(np.where(squares > _SLACK * sizes, squares, 0)).astype(np.float32)


@dataclass
class SamplerWorker:
    """Times the samplers, and compares their kept sets with the reference's.

    authors: path of the authors' file.
    """

    inputs: Inputs
    cases: Sequence[Case]
    authors: str | None = None
    _samplers: dict[str, Sampler] = field(default_factory=dict)
    _calls: dict[tuple[str, int], tuple[Call, int]] = field(default_factory=dict)

    def _sampler(self, side: str) -> Sampler:
        if side not in self._samplers:
            self._samplers[side] = make_sampler(side, self.inputs, self.authors)
        return self._samplers[side]

    def time(self, side: str, case: int) -> float:
        """Seconds per step, over about 2 ms of steps. CPU caches are warm, as they are after a model's last matmul."""
        key = side, case
        if key not in self._calls:
            call = self._sampler(side).prepare(self.cases[case], self.inputs.logits[case])
            self._calls[key] = call, calls_filling(call, _SAMPLE_SECONDS, _MOST_CALLS)
        call, count = self._calls[key]
        return seconds(call, count)

    def check(self, case: int, sides: Sequence[str]) -> dict[str, Any]:
        """Compare kept sets with the reference's, and say so in a sentence.

        Raises BenchmarkError if a side other than the authors', which always uses cosine, differs.
        """
        timed, logits = self.cases[case], self.inputs.logits[case]
        crops = [crop(row, timed.top_w, self.inputs.options, self.inputs.geometry) for row in logits]
        found = {}
        for side in sides:
            kept_ids = self._sampler(side).kept_ids
            if kept_ids is not None:
                found[side] = compare_kept_ids(side, kept_ids(timed, logits), crops, exact=side != "authors")
        sizes = sorted(len(each.kept) for each in crops)
        kept = count_text(sizes[0], "token") if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} tokens"
        parts = [f"{count_text(len(crops), 'row')}, {sum(each.certified for each in crops)} certified, {kept} kept"]
        agreeing = [side for side, (same, _) in found.items() if same == len(crops)]
        parts += [f"the reference's set on every row: {', '.join(agreeing)}"] if agreeing else []
        parts += [
            f"{side} on {same} of {len(crops)}, {ties} differ at a tie"
            for side, (same, ties) in found.items()
            if side not in agreeing
        ]
        return {
            "sentence": "; ".join(parts),
            "certified": sum(each.certified for each in crops),
            "kept": [len(each.kept) for each in crops],
            "sides": {side: {"rows": len(crops), "same": same, "ties": ties} for side, (same, ties) in found.items()},
        }


def compare_kept_ids(side: str, kept: Sequence[ArrayLike], crops: Sequence[Crop], *, exact: bool) -> tuple[int, int]:
    """Compare the kept ids of each row with the reference's. Returns (equal rows, other rows at a tie).

    Raises BenchmarkError if an `exact` side differs beyond ties (docs/contract/graph.md, section 4).
    """
    same = ties = 0
    for row, (ids, reference) in enumerate(zip(kept, crops, strict=True)):
        kept_ids = np.unique(np.asarray(ids, np.int64))
        if np.array_equal(kept_ids, np.sort(reference.kept)):
            same += 1
        elif reference.ties.allow_other_set(FLOAT32_TIES):
            ties += 1
        elif exact:
            raise BenchmarkError(
                f"{side} keeps {len(kept_ids)} tokens of row {row} where the reference keeps {len(reference.kept)} "
                f"({len(np.setxor1d(kept_ids, reference.kept))} differ), so its time means nothing; report this with "
                "the options used."
            )
    return same, ties


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the embeddings. Returns `time` and `check`.

    settings: "folder" (with logits-0.npy and so on; embeddings and models are written to it), "cases" and "options" as
        dictionaries, "threads", and "hidden", "neighbour_bound", "authors" and "seed" as in `SamplerRequest`.
    """
    folder, options, seed = Path(settings["folder"]), TopWOptions(**settings["options"]), settings["seed"]
    cases = [Case(**case) for case in settings["cases"]]
    logits = [np.load(folder / f"logits-{index}.npy") for index in range(len(cases))]
    batch, vocab = logits[0].shape
    if options.metric == "uniform":
        embeddings, geometry = None, Geometry.uniform()
    else:
        embeddings = write_table(folder, vocab, settings["hidden"], seed)
        geometry = Geometry.from_embeddings(embeddings, options.metric)
    has_bound = settings["neighbour_bound"] and embeddings is not None
    inputs = Inputs(
        folder=folder,
        threads=settings["threads"],
        logits=logits,
        uniform=np.random.default_rng([seed, 2]).random((batch,), np.float32),
        options=options,
        geometry=geometry,
        embeddings=embeddings,
        neighbour_bound=pool_neighbour_bound(geometry, logits, options.top_m) if has_bound else None,
    )
    worker = SamplerWorker(inputs, cases, settings["authors"])
    return {"time": worker.time, "check": worker.check}
