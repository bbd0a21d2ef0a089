"""Time a step of attention with a sliding window: a buffer of the window against one of the whole sequence.

    python -m benchmarks.window_cache [--length 8192] [--window 512] [--tokens 6000] [--steps 600]

One GroupQueryAttention node on random values: 8 heads of 64, 4 key-value heads, one row, one thread. The two buffers
take turns. Prints median microseconds (quartiles).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.common import machine

HEADS, KV_HEADS, DIM = 8, 4, 64


class Attention:
    """The node over a buffer of `slots` tokens, updated in place."""

    def __init__(self, slots: int, window: int, *, evicts: bool) -> None:
        attributes: dict[str, Any] = {"sliding_window_cache": 1} if evicts else {}
        node = helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "past_k", "past_v", "last", "total"],
            ["out", "present_k", "present_v"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            local_window_size=window,
            **attributes,
        )
        new = {"q": [1, 1, HEADS * DIM], "k": [1, 1, KV_HEADS * DIM], "v": [1, 1, KV_HEADS * DIM]}
        buffer = [1, KV_HEADS, slots, DIM]
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in new.items()]
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, buffer) for name in ("past_k", "past_v")]
        inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in ("last", "total")]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            helper.make_graph([node], "step", inputs, outputs), opset_imports=opsets, ir_version=10
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        rng = np.random.default_rng(0)
        self._arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in new.items()}
        self._last, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        for name, array in {**self._arrays, "last": self._last, "total": self._total}.items():
            self._binding.bind_cpu_input(name, array)
        for part in ("k", "v"):
            memory = self._arrays[f"buffer_{part}"] = np.zeros(buffer, np.float32)
            place = ("cpu", 0, np.float32, memory.shape, memory.ctypes.data)
            self._binding.bind_input(f"past_{part}", *place)
            self._binding.bind_output(f"present_{part}", *place)
        self._binding.bind_output("out")

    def step(self, token: int) -> float:
        """Seconds of the step that appends token number `token`."""
        self._last[0], self._total[0] = token, token + 1
        started = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="slots of the whole buffer")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=6000, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    sides = {
        "whole": Attention(args.length, args.window, evicts=False),
        "window": Attention(args.window, args.window, evicts=True),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.steps):
        for name, side in sides.items():
            times[name].append(side.step(args.tokens + number))
    print(machine())
    for name, found in times.items():
        low, _, high = statistics.quantiles(found, n=4)
        print(f"{name}: {statistics.median(found) * 1e6:.0f} us ({low * 1e6:.0f}-{high * 1e6:.0f})")


if __name__ == "__main__":
    main()
