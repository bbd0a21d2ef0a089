"""Sides that run in onnxruntime: the function in the graph, the native op in its place, and standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike

from topw_deploy.bench.sampler.problem import TABLE, Case, Logits, Problem
from topw_deploy.bench.sampler.side import Call
from topw_deploy.sampling.parameters import PARAMETER_NAMES

_OPSET, _IR_VERSION = 18, 10


class SamplerSide:
    """The sampler-only model. form: of the function's body. native: with the native op registered over it."""

    def __init__(self, problem: Problem, form: str, *, native: bool) -> None:
        self._problem, self._form, self._native = problem, form, native
        self._session: ort.InferenceSession | None = None

    def step(self, case: Case, logits: Logits) -> Call:
        if self._session is None:
            self._session = self._open(with_keep_mask=False)
        return bound(self._session, feeds(self._problem, case, logits))

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        # a model of its own: to write the mask would cost the timed one
        (mask,) = self._open(with_keep_mask=True).run(["keep_mask"], feeds(self._problem, case, logits))
        return [np.flatnonzero(row) for row in mask]

    def _open(self, *, with_keep_mask: bool) -> ort.InferenceSession:
        path = sampler_file(self._problem, self._form, with_keep_mask=with_keep_mask)
        return open_session(path, self._problem.threads, native=self._native)


class OperatorSide:
    """One standard operator over the logits, beside which every sampler can be put."""

    def __init__(self, problem: Problem, op_type: str) -> None:
        vocab = problem.logits[0].shape[1]
        path = problem.folder / f"{op_type}.onnx"
        path.write_bytes(operator_model(op_type, vocab, problem.options.top_m))
        self._session = open_session(path, problem.threads)

    def step(self, case: Case, logits: Logits) -> Call:
        return bound(self._session, {"logits": logits})

    def kept(self, case: Case, logits: Logits) -> None:
        return None


def open_session(path: Path, threads: int, *, native: bool = False) -> ort.InferenceSession:
    """On the CPU, with so many threads. native: the library's op runs in place of the function."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    if native:
        from topw_deploy.plugins.shared_library import library_path

        options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def bound(session: ort.InferenceSession, inputs: Mapping[str, np.ndarray]) -> Call:
    """A run of the session with inputs and outputs bound once, as the runtime of this package runs it."""
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for node in session.get_inputs():
        binding.bind_ortvalue_input(node.name, values[node.name])
    for node in session.get_outputs():
        binding.bind_output(node.name)
    run, io_binding = session._sess.run_with_iobinding, binding._iobinding

    def call() -> Mapping[str, ort.OrtValue]:
        run(io_binding, None)
        return values  # which the binding does not keep alive

    return call


def feeds(problem: Problem, case: Case, logits: Logits) -> dict[str, np.ndarray]:
    """The inputs of the sampler, its edits present and empty."""
    batch = len(logits)
    nothing = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32}
    columns = {n: np.full(batch, getattr(case.parameters, n), np.float32) for n in PARAMETER_NAMES}
    edits = {name: np.zeros((batch, 0), dtype) for name, dtype in nothing.items()}
    return {"logits": logits, "uniform": problem.uniform, **edits, **columns}


def sampler_file(problem: Problem, form: str, *, with_keep_mask: bool) -> Path:
    """The sampler-only model in `problem.folder`; all share the one table that lies there."""
    path = problem.folder / f"{form}{'-mask' if with_keep_mask else ''}.onnx"
    if path.exists():
        return path
    import onnx_ir as ir

    from topw_deploy.export.graft.sampler_node import BOUND_NAME
    from topw_deploy.export.sampler_only import sampler_model
    from topw_deploy.export.tail import TailSpec, plain_gather

    vocab, table = problem.logits[0].shape[1], problem.embeddings
    spec = TailSpec(
        options=problem.options,
        vocab_size=vocab,
        embedding=None if table is None else plain_gather(*table.shape),
        hidden_size=None if table is None else table.shape[1],
        form=form,
        with_keep_mask=with_keep_mask,
    )
    model = sampler_model(spec, table, problem.geometry)
    constants = model.graph.initializers
    if table is not None:
        shape = ir.Shape(table.shape)
        constants["topw.embedding"].const_value = ir.ExternalTensor(
            TABLE, 0, table.nbytes, ir.DataType.FLOAT, shape=shape, name="topw.embedding", base_dir=problem.folder
        )
    if problem.neighbour_bound is not None:
        value = constants[BOUND_NAME]
        value.const_value, value.shape = ir.tensor(problem.neighbour_bound, name=BOUND_NAME), ir.Shape([vocab])
    ir.save(model, path)
    return path


def operator_model(op_type: str, vocab: int, k: int) -> bytes:
    """ArgMax over the last axis of `logits` [batch, vocab], or TopK of the `k` largest."""
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
