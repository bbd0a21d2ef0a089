"""Decode greedily with the exported decoder and ArgMax instead of the sampler, in a minimal loop.

The time of this loop is a lower bound for `TopWModel`, which adds the cost of Top-W and of this package's Python code.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from topw_deploy.errors import BenchmarkError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache import Cache, new_caches
from topw_deploy.runtime.ort.session import OrtSession
from topw_deploy.runtime.session import Binding

ARGMAX_FILE = "argmax.onnx"


def write_argmax_model(export: Path, folder: Path) -> Path:
    """Write `folder/argmax.onnx`: the model in `export` with ArgMax instead of the sampler. Returns its path.

    Hard-links the weights where possible, and copies them otherwise. Raises BenchmarkError unless the graph has exactly
    one sampler.
    """
    import onnx_ir as ir

    from topw_deploy.export.sampler.spec import OP_TYPE, SAMPLER_INPUTS

    model = ir.load(export / "model.onnx")
    graph = model.graph
    samplers = [node for node in graph if node.op_type == OP_TYPE]
    if len(samplers) != 1:
        raise BenchmarkError(f"{export} has {len(samplers)} samplers, but must have one; export the model again.")
    (sampler,) = samplers
    argmax = ir.Node("", "ArgMax", [sampler.inputs[0]], [ir.AttrInt64("axis", 1), ir.AttrInt64("keepdims", 0)])
    argmax.name = "argmax"
    graph.insert_after(sampler, argmax)
    token, old_token = argmax.outputs[0], next(value for value in graph.outputs if value.name == "next_token")
    states = [value for value in graph.outputs if value.name is not None and value.name.startswith("present.")]
    token.type, token.shape = old_token.type, old_token.shape
    graph.outputs.clear()
    graph.outputs.extend([token, *states])
    graph.remove(sampler, safe=True)
    token.name = "next_token"
    inputs = [value for value in graph.inputs if value.name not in SAMPLER_INPUTS]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    model.functions.clear()
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    link_weights(export, folder)
    ir.save(model, folder / ARGMAX_FILE)
    return folder / ARGMAX_FILE


def link_weights(export: Path, folder: Path) -> None:
    """Hard-link the data files of `export` into `folder`, or copy them where that is impossible."""
    for data in (path for pattern in ("*.onnx_data*", "*.onnx.data*") for path in export.glob(pattern)):
        try:
            os.link(data, folder / data.name)
        except OSError:
            shutil.copyfile(data, folder / data.name)


class ArgMaxLoop:
    """Decodes greedily, one sequence at a time, with the model of `write_argmax_model`.

    path: the model.
    decoder: the manifest's description of the model's cache.
    options: of the session.
    """

    def __init__(self, path: Path, decoder: DecoderInfo, options: ort.SessionOptions) -> None:
        self._session = OrtSession(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
        self._caches = new_caches(self._session, decoder)
        self._sequence: ArgMaxSequence | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the states; 0 before the first prompt, and if onnxruntime owns the cache."""
        return self._caches.bytes

    def prefill(self, prompt: list[int], capacity: int) -> ArgMaxSequence:
        """Run a prompt. The sequence of the previous prompt ends.

        capacity: maximum length of the sequence, including the prompt.
        """
        if self._sequence is not None:
            self._sequence.close()
        binding = self._session.bind()
        token = np.zeros(1, np.int64)
        binding.bind_result("next_token", token)
        cache = self._caches.open(binding, [prompt], [capacity - len(prompt)])
        cache.feed_prompts()
        binding.run()
        cache.begin_decoding()
        self._sequence = ArgMaxSequence(binding, cache, token)
        return self._sequence


class ArgMaxSequence:
    """A sequence of `ArgMaxLoop` after its prompt.

    token: int64 [1], the array that the binding writes the last token to.
    """

    def __init__(self, binding: Binding, cache: Cache, token: NDArray[np.int64]) -> None:
        self._binding, self._cache, self._token = binding, cache, token

    @property
    def token(self) -> int:
        """The last token."""
        return int(self._token[0])

    def step(self) -> int:
        """Append the last token to the sequence; returns the next token."""
        self._cache.input_ids[0, 0] = self._token[0]
        self._cache.advance((0,))
        self._binding.run()
        return int(self._token[0])

    def close(self) -> None:
        """Free the cache."""
        self._cache.close()
