"""Time of one product with 4- or 8-bit weights: the native operator against onnxruntime's MatMulNBits.

    python -m benchmarks.products [--rounds 15] [--threads 1] [--rows 1 2 4 8 16] [--set avx2]

All sides in turn; inputs and outputs are bound once. Figures: docs/guide/native.md.
"""

from __future__ import annotations

import argparse
import ctypes
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from benchmarks.common import Spread, interleave, machine, ratio, seconds, share_thread_pool, table
from topw_deploy.export.native_functions import call_functions
from topw_deploy.plugins.library import library_path


class Shape(NamedTuple):
    outputs: int
    inputs: int
    bits: int
    block_size: int


SHAPES = (
    Shape(16_384, 4_096, 4, 128),
    Shape(16_384, 4_096, 4, 32),
    Shape(16_384, 4_096, 8, 128),
    Shape(49_152, 576, 8, 64),  # SmolLM2's head
    Shape(128_256, 2_048, 8, 128),
)
SIDES = {"native": True, "onnxruntime": False}


def product_session(shape: Shape, *, native: bool) -> ort.InferenceSession:
    """A product with random codes, of the native operator or of onnxruntime's."""
    rng, count = np.random.default_rng(0), shape.inputs // shape.block_size
    codes = rng.integers(0, 256, (shape.outputs, count, shape.block_size * shape.bits // 8), np.uint8)
    arrays = {"codes": codes, "scales": rng.uniform(0.001, 0.002, (shape.outputs, count)).astype(np.float32)}
    weights = [ir.val(name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()]
    x = ir.val("x", ir.DataType.FLOAT, [1, "rows", shape.inputs])
    attributes = {"K": shape.inputs, "N": shape.outputs, "bits": shape.bits, "block_size": shape.block_size}
    node = ir.node("MatMulNBits", [x, *weights], attributes=attributes | {"accuracy_level": 4}, domain="com.microsoft")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "rows", shape.outputs])
    imports = {"": 21, "com.microsoft": 1}
    graph = ir.Graph([x], [y], nodes=[node], initializers=weights, opset_imports=imports, name="product")
    return open_session(graph, native=native)


def open_session(graph: ir.Graph, *, native: bool) -> ort.InferenceSession:
    """A session of nodes of onnxruntime, or of the native operators in their place."""
    model, options = ir.Model(graph, ir_version=10), ort.SessionOptions()
    options.use_per_session_threads = False
    if native:
        call_functions(model, 21)
        options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound_run(session: ort.InferenceSession, x: np.ndarray, outputs: int) -> partial[None]:
    """A function that runs the session on x, float32 [1, rows, inputs]."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(np.empty((*x.shape[:2], outputs), np.float32)))
    return partial(session.run_with_iobinding, binding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--set", help="instruction set of the native operator, such as avx2; the best by default")
    options = parser.parse_args()
    share_thread_pool(options.threads)
    library = ctypes.CDLL(str(library_path()))
    if options.set and library.topw_use_product(options.set.encode()):
        parser.error(f"--set {options.set}: this machine lacks it; known are amx, avx512_vnni, avx_vnni and avx2")
    lines = []
    for shape in SHAPES:
        sessions = {name: product_session(shape, native=native) for name, native in SIDES.items()}
        sides = {}
        for (name, session), rows in product(sessions.items(), options.rows):
            x = np.random.default_rng(rows).standard_normal((1, rows, shape.inputs), np.float32)
            sides[f"{name} {rows}"] = partial(seconds, bound_run(session, x, shape.outputs), 3)
        times = interleave(sides, options.rounds, warmup=2)
        for rows in options.rows:
            lines.append(
                (
                    f"{shape.outputs:,} x {shape.inputs:,}, {shape.bits} bits, blocks of {shape.block_size}",
                    str(rows),
                    Spread.of(times[f"native {rows}"]).format(1000),
                    ratio(times, f"native {rows}", f"onnxruntime {rows}").format(),
                    ratio(times, f"native {rows}", f"native {options.rows[0]}").format(),
                )
            )
    print(f"{machine()}; {options.threads} threads\n")
    print(table(("weight", "rows", "ms", "to MatMulNBits", f"to {options.rows[0]} rows"), lines))


if __name__ == "__main__":
    main()
