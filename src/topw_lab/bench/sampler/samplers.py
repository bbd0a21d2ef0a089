"""The samplers of onnxruntime. `torch_samplers` has the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.runtime.inputs import RuleInputs
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_lab.bench.sampler.inputs import TABLE_FILE, Case, Logits, SamplerInputs

if TYPE_CHECKING:
    import onnxruntime as ort

Call = Callable[[], object]

_OPSET, _IR_VERSION = 18, 10


class TimedSampler(Protocol):
    """A sampler that can be timed."""

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        """Prepare a step on the rows `logits` [B, V]. The returned call makes the step, as often as it is called."""

    def kept_ids(self, case: Case, logits: Logits) -> Sequence[ArrayLike] | None:
        """The kept ids of each row; None if the sampler is not Top-W or keeps no set.

        Steps do not report the kept ids, because that takes time.
        """


def ids_of_mask(keep_mask: NDArray[np.bool_] | None) -> list[NDArray[np.int64]] | None:
    """The kept ids of each row of a mask [B, V]; None without a mask."""
    return None if keep_mask is None else [np.flatnonzero(row) for row in keep_mask]


class NumpyMax:
    """`numpy.max` of each row, as a yardstick: every sampler must read the logits."""

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        return lambda: np.max(logits, axis=1) if len(logits) > 1 else np.max(logits[0])

    def kept_ids(self, case: Case, logits: Logits) -> None:
        return None


class GraphSampler:
    """Top-W in onnxruntime: a sampler-only model.

    form: the form of the function's body.
    native: whether the native operator runs instead of the function.
    """

    def __init__(self, inputs: SamplerInputs, form: str, *, native: bool) -> None:
        self._inputs, self._form, self._native = inputs, form, native
        self._session: ort.InferenceSession | None = None

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        if self._session is None:
            self._session = self._open(with_keep_mask=False)
        return bind_run(self._session, session_inputs(self._inputs, case, logits))

    def kept_ids(self, case: Case, logits: Logits) -> Sequence[ArrayLike] | None:
        # A model of its own, because an output of the mask takes time.
        (keep_mask,) = self._open(with_keep_mask=True).run(["keep_mask"], session_inputs(self._inputs, case, logits))
        return ids_of_mask(keep_mask)

    def _open(self, *, with_keep_mask: bool) -> ort.InferenceSession:
        path = write_sampler_model(self._inputs, self._form, with_keep_mask=with_keep_mask)
        return open_session(path, self._inputs.threads, native=self._native)


class OperatorModel:
    """A standard operator of onnxruntime on the logits, as a yardstick.

    op_type: "ArgMax" or "TopK".
    """

    def __init__(self, inputs: SamplerInputs, op_type: str) -> None:
        vocab = inputs.logits[0].shape[1]
        path = inputs.folder / f"{op_type}.onnx"
        path.write_bytes(operator_model(op_type, vocab, inputs.options.top_m))
        self._session = open_session(path, inputs.threads)

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        return bind_run(self._session, {"logits": logits})

    def kept_ids(self, case: Case, logits: Logits) -> None:
        return None


def open_session(path: Path, threads: int, *, native: bool = False) -> ort.InferenceSession:
    """Open a session on the CPU.

    native: whether to register the native operator.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    if native:
        from topw_deploy.plugins.shared_library import library_path

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


def session_inputs(inputs: SamplerInputs, case: Case, logits: Logits) -> dict[str, np.ndarray]:
    """The inputs of the sampler-only model by name: no edits, no masks, and Top-W as the rule of every row."""
    batch = len(logits)
    empty = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32, "allowed": np.int32}
    columns = {n: np.full(batch, getattr(case.parameters, n), np.float32) for n in PARAMETER_NAMES}
    edits = {name: np.zeros((batch, 0), dtype) for name, dtype in empty.items()}
    return {"logits": logits, "uniform": inputs.uniform, **edits, **columns, **RuleInputs(batch).arrays}


def write_sampler_model(inputs: SamplerInputs, form: str, *, with_keep_mask: bool) -> Path:
    """Write the sampler-only model to `inputs.folder`, unless it exists. Returns its path. Models share one table."""
    path = inputs.folder / f"{form}{'-mask' if with_keep_mask else ''}.onnx"
    if path.exists():
        return path
    import onnx_ir as ir

    from topw_deploy.export.embedding import plain_gather
    from topw_deploy.export.graft.sampler_node import BOUND_NAME
    from topw_deploy.export.sampler_only import sampler_model
    from topw_deploy.export.tail import TailSpec

    vocab, table = inputs.logits[0].shape[1], inputs.embeddings
    spec = TailSpec(
        options=inputs.options,
        vocab_size=vocab,
        embedding=None if table is None else plain_gather(*table.shape),
        hidden_size=None if table is None else table.shape[1],
        form=form,
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    return bytes(model.SerializeToString())
