"""The samplers that `topw bench sampler` times in this environment, their logits, and their worker.

A process of its own, because BLAS libraries fix their thread count when they are loaded, and native code may crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import BenchmarkError
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.sampling import Geometry, RuleParameters, TopWOptions, TopWParameters, crop
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop, candidate_pool
from topw_deploy.text import count_text
from topw_lab.bench.logits import Logits
from topw_lab.bench.measure import seconds
from topw_lab.bench.sides import MIN_P, TOP_K, TOP_P, load_processor

if TYPE_CHECKING:
    import onnxruntime as ort

Parameters = Mapping[str, float]
"""Top-W's parameters of one case, rounded to float32."""
Call = Callable[[], Any]

TABLE_FILE = "table.bin"
_BLOCK = 1024  # tokens of the embedding table that are processed at once
_SLACK = 1e-3  # relative; far above the rounding error of float32 on random points
_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many


@dataclass(frozen=True)
class Inputs:
    """The inputs of all samplers, for B sequences, V tokens and d coordinates.

    folder: the folder with TABLE_FILE, to which samplers also write their models.
    threads: number of threads of every sampler.
    logits: float32 [B, V] for each case.
    uniform: float32 [B], the uniform number of each sequence.
    options, geometry: of Top-W.
    embeddings: float32 [V, d]; None for the metric `uniform`.
    neighbour_bound: float32 [V]; None without a bound.
    authors: the authors' file; None without.
    """

    folder: Path
    threads: int
    logits: Sequence[Logits]
    uniform: NDArray[np.float32]
    options: TopWOptions
    geometry: Geometry
    embeddings: NDArray[np.float32] | None
    neighbour_bound: NDArray[np.float32] | None
    authors: str | None


@dataclass(frozen=True)
class Sampler:
    """A sampler that can be timed.

    prepare: takes a case and logits [B, V], and returns a call that makes a step on them, as often as it is called.
    keep_mask: the kept set of each sequence, bool [B, V], which steps do not report, because that takes time. None if
        the sampler is not Top-W.
    """

    prepare: Callable[[Parameters, Logits], Call]
    keep_mask: Callable[[Parameters, Logits], ArrayLike] | None = None


def graph_sampler(inputs: Inputs, *, native: bool) -> Sampler:
    """Top-W in onnxruntime: a sampler-only model. native: the native operator runs instead of the function."""

    def open_model(with_keep_mask: bool) -> ort.InferenceSession:
        path = write_sampler_model(inputs, with_keep_mask=with_keep_mask)
        return open_session(path, inputs.threads, native=native)

    session = open_model(with_keep_mask=False)

    def keep_mask(case: Parameters, logits: Logits) -> ArrayLike:
        # A model of its own, because an output of the mask takes time.
        mask: ArrayLike = open_model(with_keep_mask=True).run(["keep_mask"], session_inputs(inputs, case, logits))[0]
        return mask

    return Sampler(lambda case, logits: bind_run(session, session_inputs(inputs, case, logits)), keep_mask)


def torch_sampler(inputs: Inputs) -> Sampler:
    """Top-W in PyTorch: `crop_rows` on the CPU, for all rows at once."""
    import torch

    from topw_deploy.sampling.torch import TensorGeometry, crop_rows

    geometry = None
    if inputs.embeddings is not None:
        path, shape = str(inputs.folder / TABLE_FILE), inputs.embeddings.shape
        table = torch.from_file(path, size=inputs.embeddings.size).view(shape)
        geometry = TensorGeometry.from_embeddings(table, inputs.options.metric)

    def prepare(case: Parameters, logits: Logits) -> Call:
        scores, parameters = torch.from_numpy(logits), TopWParameters(**case)
        return lambda: crop_rows(scores, parameters, inputs.options, geometry).keep_mask

    return Sampler(prepare, lambda case, logits: prepare(case, logits)().numpy())


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

    def prepare(case: Parameters, logits: Logits) -> Call:
        scores = torch.from_numpy(logits) / max(case["temperature"], 1e-5)
        return lambda: warp(None, scores)

    return Sampler(prepare)


def authors_sampler(inputs: Inputs) -> Sampler:
    """The user's copy of the logits processor of arashgholami/top-w-decoding, with the parameters of the case.

    The processor always computes cosine distances, for one row at a time. There is one, because its constructor takes
    long.
    """
    import torch

    if inputs.embeddings is None:
        raise BenchmarkError("authors needs embeddings, but the metric is uniform; choose another --metric.")
    processor_class = load_processor(Path(str(inputs.authors)))
    made: Any = None

    def prepare(case: Parameters, logits: Logits) -> Call:
        nonlocal made
        parameters = {
            "selection_temperature": case["selection_temperature"] or case["temperature"],
            "top_m": inputs.options.top_m,
            "init_top_p": case["init_top_p"],
            "alt_iters": inputs.options.alt_iters,
            "geom_scale": case["geom_scale"],
            "lam_fixed": case["lam"],
            "beta": case["beta"],
        }
        made = made or processor_class(
            np.asarray(inputs.embeddings), print_params=False, print_kept=False, **parameters
        )
        rows = [torch.from_numpy(row[None]) for row in logits]

        def warp() -> list[Any]:
            vars(made).update(parameters)
            return [made(None, row) for row in rows]

        return warp

    return Sampler(prepare, lambda case, logits: [np.isfinite(row[0].numpy()) for row in prepare(case, logits)()])


def argmax_sampler(inputs: Inputs) -> Sampler:
    """onnxruntime's ArgMax, as a yardstick."""
    import onnx.parser

    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> argmax (float[batch, vocab] logits) => (int64[batch, 1] token)'
        "{ token = ArgMax<axis = 1>(logits) }"
    )
    session = open_session(model.SerializeToString(), inputs.threads)
    return Sampler(lambda _case, logits: bind_run(session, {"logits": logits}))


def make_sampler(name: str, inputs: Inputs) -> Sampler:
    """Make the sampler of side `name`, and import its libraries."""
    if name in ("native", "graph"):
        return graph_sampler(inputs, native=name == "native")
    if name == "argmax":
        return argmax_sampler(inputs)
    if name == "max":  # every sampler must read the logits
        return Sampler(lambda _case, logits: lambda: np.max(logits, axis=1) if len(logits) > 1 else np.max(logits[0]))
    import torch

    torch.set_num_threads(inputs.threads)
    if name == "authors":
        return authors_sampler(inputs)
    return torch_sampler(inputs) if name == "torch" else transformers_warper(name.removeprefix("hf-"))


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


def session_inputs(inputs: Inputs, case: Parameters, logits: Logits) -> dict[str, np.ndarray]:
    """The inputs of the sampler-only model by name: no edits, no masks, and Top-W as the rule of every sequence."""
    batch = len(logits)
    empty = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32, "allowed": np.int32}
    columns = {name: np.full(batch, case[name], np.float32) for name in PARAMETER_NAMES}
    edits = {name: np.zeros((batch, 0), dtype) for name, dtype in empty.items()}
    return {"logits": logits, "uniform": inputs.uniform, **edits, **columns, **rule_arrays([RuleParameters()] * batch)}


def write_sampler_model(inputs: Inputs, *, with_keep_mask: bool) -> Path:
    """Write the sampler-only model to `inputs.folder`, unless it exists. Returns its path. Models share one table."""
    path = inputs.folder / f"sampler{'-mask' if with_keep_mask else ''}.onnx"
    if path.exists():
        return path
    import onnx_ir as ir

    from topw_deploy.export.embedding import plain_gather
    from topw_deploy.export.sampler.attach import BOUND_NAME
    from topw_deploy.export.sampler.node import SamplerSpec
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


def write_table(folder: Path, vocab: int, hidden: int, seed: int) -> NDArray[np.float32]:
    """Write random embeddings, float32 [vocab, hidden], to `folder / TABLE_FILE`. Returns them memory-mapped."""
    rng = np.random.default_rng([seed, 1])
    with (folder / TABLE_FILE).open("wb") as file:
        for start in range(0, vocab, _BLOCK):
            file.write(rng.standard_normal((min(_BLOCK, vocab - start), hidden), dtype=np.float32).tobytes())
    return np.memmap(folder / TABLE_FILE, np.float32, "r", shape=(vocab, hidden))


def pool_neighbour_bound(geometry: Geometry, logits: Sequence[Logits], top_m: int) -> NDArray[np.float32]:
    """The neighbour bound, float32 [V], for the tokens in the pools of `logits`; 0, a valid bound, for all others.

    Samplers read only the entries of these tokens, and these entries cost pool x V distances instead of V x V.
    """
    vocab = logits[0].shape[1]
    pools = [candidate_pool(one.astype(np.float64), top_m)[0] for batch in logits for one in batch]
    ids = np.unique(np.concatenate(pools))
    nearest = np.full(len(ids), np.inf)
    for start in range(0, vocab, _BLOCK):
        others = np.arange(start, min(start + _BLOCK, vocab))
        distances = np.where(ids[:, None] == others, np.inf, geometry.distances(ids, others))
        np.minimum(nearest, distances.min(axis=1), out=nearest)
    bound = np.zeros(vocab, np.float32)
    bound[ids] = nearest * (1 - _SLACK)
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


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the embeddings. Returns `time` (seconds per step) and `check` (of kept sets).

    settings: "folder" (with logits-0.npy and so on; embeddings and models are written to it), "cases" (Top-W's
        parameters), "threads", and "options", "hidden", "neighbour_bound", "authors" and "seed" as in `sampler.run`.
    """
    folder, options, cases = Path(settings["folder"]), TopWOptions(**settings["options"]), settings["cases"]
    logits = [np.load(folder / f"logits-{index}.npy") for index in range(len(cases))]
    batch, vocab = logits[0].shape
    embeddings, geometry, bound = None, Geometry.uniform(), None
    if options.metric != "uniform":
        embeddings = write_table(folder, vocab, settings["hidden"], settings["seed"])
        geometry = Geometry.from_embeddings(embeddings, options.metric)
        if settings["neighbour_bound"]:
            bound = pool_neighbour_bound(geometry, logits, options.top_m)
    uniform = np.random.default_rng([settings["seed"], 2]).random((batch,), np.float32)
    inputs = Inputs(folder, settings["threads"], logits, uniform, options, geometry, embeddings, bound,
                    settings["authors"])  # fmt: skip
    sampler = cache(lambda side: make_sampler(side, inputs))

    @cache
    def prepared(side: str, case: int) -> tuple[Call, int]:
        call = sampler(side).prepare(cases[case], logits[case])
        call()
        return call, max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(seconds(call), 1e-9))))

    def time(side: str, case: int) -> float:
        """Seconds per step, over about 2 ms of steps. CPU caches are warm, as they are after a model's last matmul."""
        return seconds(*prepared(side, case))

    def check(case: int, sides: Sequence[str]) -> dict[str, Any]:
        """Compare kept sets with the reference's, and say so in a sentence.

        Raises BenchmarkError if a side other than the authors', which always uses cosine, differs.
        """
        references = [crop(one, TopWParameters(**cases[case]), options, geometry) for one in logits[case]]
        certified, sizes = sum(one.certified for one in references), [len(one.kept) for one in references]
        least, most = min(sizes), max(sizes)
        kept = count_text(least, "token") if least == most else f"{least} to {most} tokens"
        parts = [f"{count_text(len(references), 'sequence')}, {certified} certified, {kept} kept"]
        counts = {}
        for side in sides:
            keep_mask = sampler(side).keep_mask
            if keep_mask is not None:
                mask = keep_mask(cases[case], logits[case])
                same, ties = compare_kept_sets(side, mask, references, exact=side != "authors")
                counts[side] = {"same": same, "ties": ties}
                parts.append(f"{side} keeps the reference's set on {same}" + (f", ties on {ties}" if ties else ""))
        return {"sentence": "; ".join(parts), "certified": certified, "kept": sizes, "sides": counts}

    return {"time": time, "check": check}
