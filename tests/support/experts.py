"""Graphs of one mixture of experts, and its literal result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.graph import GraphEditor

EXPERTS, HIDDEN, INNER, CHOSEN = 6, 64, 96, 2


@dataclass(frozen=True)
class Mixture:
    """up: [E, 2 I, D] or [E, I, D]; down: [E, D, I]; biases [E, n] or None."""

    up: np.ndarray
    down: np.ndarray
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    activation: str = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0
    interleaved: bool = False


def random_mixture(*, biases: bool = False, **settings: object) -> Mixture:
    """Random matrices whose products keep the size of their inputs."""
    rng = np.random.default_rng(0)
    width = 2 * INNER if settings.get("activation", "swiglu") == "swiglu" else INNER
    up = rng.standard_normal((EXPERTS, width, HIDDEN)) / HIDDEN**0.5
    down = rng.standard_normal((EXPERTS, HIDDEN, INNER)) / INNER**0.5
    terms = [rng.standard_normal((EXPERTS, size)).astype(np.float32) if biases else None for size in (width, HIDDEN)]
    return Mixture(up.astype(np.float32), down.astype(np.float32), *terms, **settings)  # type: ignore[arg-type]


def mixture_graph(mixture: Mixture, *, positive: bool, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """hidden, ids, weights -> out, with one placeholder.

    positive: the graph shows that weights are not negative.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23, "topw.trace": 1}, name="mixture")
    editor = GraphEditor(graph, "mixture")
    hidden = editor.input("hidden", dtype, ["tokens", HIDDEN])
    ids = editor.input("ids", ir.DataType.INT64, ["tokens", CHOSEN])
    weights = editor.input("weights", dtype, ["tokens", CHOSEN])
    two = editor.constant(np.array(2, dtype.numpy()))
    rows = editor.op("Mul", [hidden, two], dtype=dtype, shape=["tokens", HIDDEN])  # a buffer that may be reused
    shown = editor.op("Abs", [weights], dtype=dtype, shape=["tokens", CHOSEN]) if positive else weights
    arrays = (mixture.up, mixture.down, mixture.up_bias, mixture.down_bias)
    names = ("experts.up", "experts.down", "experts.up_bias", "experts.down_bias")
    stored = [
        None if array is None else editor.constant(array.astype(dtype.numpy()), name)
        for array, name in zip(arrays, names, strict=True)
    ]
    if stored[2] is None:
        stored = stored[:2]
    attributes = {name: getattr(mixture, name) for name in ("activation", "alpha", "beta", "limit")}
    out = editor.op(
        "Experts",
        [rows, ids, shown, *stored],
        domain="topw.trace",
        dtype=dtype,
        shape=["tokens", HIDDEN],
        interleaved=int(mixture.interleaved),
        **attributes,
    )
    graph.outputs.append(editor.op("Mul", [out, two], dtype=dtype, shape=["tokens", HIDDEN], name="out"))
    return ir.Model(graph, ir_version=10)


def literal(mixture: Mixture, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What `mixture_graph` computes, token by token in float64."""
    out = np.zeros(hidden.shape)
    for token, (row, chosen) in enumerate(zip(2 * hidden.astype(np.float64), ids, strict=True)):
        for place, expert in enumerate(chosen):
            inner = mixture.up[expert].astype(np.float64) @ row
            inner = inner if mixture.up_bias is None else inner + mixture.up_bias[expert]
            result = mixture.down[expert].astype(np.float64) @ _activated(mixture, inner)
            result = result if mixture.down_bias is None else result + mixture.down_bias[expert]
            out[token] += weights[token, place] * result
    return 2 * out


def run(model: ir.Model, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    kind = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[session.get_inputs()[0].type]
    feeds = {"hidden": hidden.astype(kind), "ids": ids, "weights": weights.astype(kind)}
    return np.asarray(session.run(["out"], feeds)[0], dtype=np.float64)


def inputs_of(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, different ids in each row, and weights above and below 1."""
    rng = np.random.default_rng(tokens)
    hidden = rng.standard_normal((tokens, HIDDEN)).astype(np.float32) / 2
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :CHOSEN]
    return hidden, ids, (3 * rng.random((tokens, CHOSEN)) ** 4).astype(np.float32)


def _activated(mixture: Mixture, inner: np.ndarray) -> np.ndarray:
    plain = {
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "identity": lambda x: x,
    }
    if mixture.activation in plain:
        return np.asarray(plain[mixture.activation](inner))
    gate, up = (inner[::2], inner[1::2]) if mixture.interleaved else np.split(inner, 2)
    if mixture.limit:
        gate, up = np.minimum(gate, mixture.limit), np.clip(up, -mixture.limit, mixture.limit)
    return np.asarray(gate / (1 + np.exp(-mixture.alpha * gate)) * (up + mixture.beta))
