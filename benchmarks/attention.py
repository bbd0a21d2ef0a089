"""Time of attention to a static cache: the native operator against onnxruntime's GroupQueryAttention.

    python -m benchmarks.attention [--rounds 15] [--threads 1]

Both sides in turn; inputs and outputs are bound once. Figures: docs/guide/native.md.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from benchmarks.common import Spread, interleave, machine, ratio, seconds, share_thread_pool, table
from benchmarks.products import SIDES, open_session


class Heads(NamedTuple):
    queries: int
    keys: int
    size: int


class Run(NamedTuple):
    """Rows that have `past` tokens get `columns` new ones."""

    rows: int
    past: int
    columns: int


HEADS = (Heads(9, 3, 64), Heads(32, 8, 64), Heads(8, 8, 128))  # the first are SmolLM2's
RUNS = (
    Run(1, 64, 1),
    Run(1, 1024, 1),
    Run(1, 4096, 1),
    Run(8, 512, 1),
    Run(1, 512, 4),
    Run(1, 0, 256),
    Run(1, 2048, 256),
)


def attention_session(heads: Heads, *, native: bool) -> ort.InferenceSession:
    """Attention of packed queries, keys and values that are not rotated."""
    kind, size = ir.DataType.FLOAT, heads.size
    state = ["rows", heads.keys, "slots", size]
    inputs = [ir.val("query", kind, ["rows", "columns", (heads.queries + 2 * heads.keys) * size])]
    inputs += [ir.val(f"past_{name}", kind, state) for name in ("key", "value")]
    inputs += [ir.val("last", ir.DataType.INT32, ["rows"]), ir.val("total", ir.DataType.INT32, [1])]
    attributes = {"num_heads": heads.queries, "kv_num_heads": heads.keys, "scale": size**-0.5}
    arguments = [inputs[0], None, None, *inputs[1:]]
    node = ir.node("GroupQueryAttention", arguments, attributes, domain="com.microsoft", num_outputs=3)
    for value, name in zip(node.outputs, ("output", "present_key", "present_value"), strict=True):
        value.name, value.type = name, ir.TensorType(kind)
    inputs.append(ir.val("row_lengths", ir.DataType.INT64, ["rows"]))
    imports = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name="attention")
    return open_session(graph, native=native)


def bound_run(session: ort.InferenceSession, heads: Heads, run: Run) -> partial[None]:
    """A function that runs the session on random queries and states."""
    rng, binding, total = np.random.default_rng(0), session.io_binding(), run.past + run.columns
    width = (heads.queries + 2 * heads.keys) * heads.size
    feeds = {
        "query": rng.standard_normal((run.rows, run.columns, width), np.float32),
        "last": np.full(run.rows, total - 1, np.int32),
        "total": np.array([total], np.int32),
        "row_lengths": np.full(run.rows, run.columns, np.int64),
    }
    for node in session.get_inputs():
        if node.name in feeds:
            binding.bind_cpu_input(node.name, feeds[node.name])
    for name in ("key", "value"):
        state = rng.standard_normal((run.rows, heads.keys, total, heads.size), np.float32)
        value = ort.OrtValue.ortvalue_from_numpy(state)
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    output = np.empty((run.rows, run.columns, heads.queries * heads.size), np.float32)
    binding.bind_ortvalue_output("output", ort.OrtValue.ortvalue_from_numpy(output))
    return partial(session.run_with_iobinding, binding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    share_thread_pool(options.threads)
    lines = []
    for heads in HEADS:
        sessions = {name: attention_session(heads, native=native) for name, native in SIDES.items()}
        for run in RUNS:
            sides = {
                name: partial(seconds, bound_run(session, heads, run), 1 if run.columns > 4 else 20)
                for name, session in sessions.items()
            }
            times = interleave(sides, options.rounds, warmup=2)
            read = 2 * run.rows * heads.keys * (run.past + run.columns) * heads.size * 4
            lines.append(
                (
                    f"{heads.queries}/{heads.keys} heads of {heads.size}",
                    f"{run.rows} rows of {run.past:,} + {run.columns}",
                    Spread.of(times["native"]).format(1_000_000),
                    f"{read / float(np.median(times['native'])) / 1e9:.1f}",
                    ratio(times, "native", "onnxruntime").format(),
                )
            )
    print(f"{machine()}; {options.threads} threads\n")
    print(table(("heads", "tokens", "us", "GB/s", "to GroupQueryAttention"), lines))


if __name__ == "__main__":
    main()
