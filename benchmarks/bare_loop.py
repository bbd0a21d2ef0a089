"""The least a generation loop can do: one session, IO binding, ArgMax in the graph in the sampler's place.

The yardstick for the decoding benchmark: what `TopWModel` takes beyond it is the price of Top-W and of this
package's Python, together.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.tail import TAIL_INPUTS


def with_argmax(folder: Path) -> Path:
    """`folder/bare.onnx`: the exported decoder with ArgMax over its logits instead of the sampler node."""
    path = folder / "bare.onnx"
    model = ir.load(folder / "model.onnx")
    graph = model.graph
    (sampler,) = [node for node in graph if node.op_type == "TopWSample"]
    argmax = ir.Node(
        "", "ArgMax", [sampler.inputs[0]], [ir.AttrInt64("axis", 1), ir.AttrInt64("keepdims", 0)], name="argmax"
    )
    token = argmax.outputs[0]
    graph.insert_after(sampler, argmax)
    old = next(value for value in graph.outputs if value.name == "next_token")
    keep = [value for value in graph.outputs if value.name.startswith("present.")]
    token.type, token.shape = old.type, old.shape
    graph.outputs.clear()
    graph.outputs.extend([token, *keep])
    graph.remove(sampler, safe=True)
    token.name = "next_token"
    kept_inputs = [value for value in graph.inputs if value.name not in TAIL_INPUTS]
    graph.inputs.clear()
    graph.inputs.extend(kept_inputs)
    model.functions.clear()
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    ir.save(model, path)
    return path


class BareLoop:
    """Greedy decoding with nothing around it; `run` returns the tokens and the seconds of the decode steps."""

    def __init__(self, path: Path, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.past = [value for value in self.session.get_inputs() if value.name.startswith("past_key_values.")]
        self.names = [value.name.replace("past_key_values", "present") for value in self.past]

    def run(self, prompt: np.ndarray, new_tokens: int) -> tuple[list[int], float]:
        """prompt int64 [1, sequence]; new_tokens >= 1 counts the one that prefill gives."""
        binding = self.session.io_binding()
        binding.bind_output("next_token", "cpu")
        for name in self.names:
            binding.bind_output(name, "cpu")
        length = prompt.shape[1]
        binding.bind_cpu_input("input_ids", prompt)
        binding.bind_cpu_input("attention_mask", np.ones((1, length), np.int64))
        binding.bind_cpu_input("position_ids", np.arange(length, dtype=np.int64)[None])
        for value in self.past:
            heads, size = value.shape[1], value.shape[3]
            binding.bind_cpu_input(value.name, np.zeros((1, heads, 0, size), np.float32))
        self.session.run_with_iobinding(binding)
        started = time.perf_counter()
        tokens = []
        for step in range(length, length + new_tokens - 1):
            token, *present = binding.get_outputs()
            tokens.append(int(token.numpy()[0]))
            binding.bind_ortvalue_input("input_ids", ort.OrtValue.ortvalue_from_numpy(np.array([[tokens[-1]]])))
            binding.bind_cpu_input("attention_mask", np.ones((1, step + 1), np.int64))
            binding.bind_cpu_input("position_ids", np.array([[step]]))
            for value, name, kv in zip(self.past, self.names, present, strict=True):
                binding.bind_ortvalue_input(value.name, kv)
                binding.bind_output(name, "cpu")  # let go of the last value: the next one is larger
            self.session.run_with_iobinding(binding)
        tokens.append(int(binding.get_outputs()[0].numpy()[0]))
        return tokens, time.perf_counter() - started
