"""The exported decoder with ArgMax instead of the sampler, in a minimal greedy loop.

It is the lower bound: `TopWModel` adds the cost of Top-W and of this package's Python code.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import BenchmarkError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache import Cache, caches_of
from topw_deploy.runtime.ort.session import OrtSession

FILE = "argmax.onnx"


def with_argmax(export: Path, folder: Path) -> Path:
    """Write `folder/argmax.onnx`: `export` with ArgMax instead of the sampler.

    Hard-links the weights where possible. Raises BenchmarkError unless the graph has exactly one sampler.
    """
    import onnx_ir as ir

    from topw_deploy.export.tail import OP_TYPE, TAIL_INPUTS

    model = ir.load(export / "model.onnx")
    graph = model.graph
    samplers = [node for node in graph if node.op_type == OP_TYPE]
    if len(samplers) != 1:
        raise BenchmarkError(f"{export} has {len(samplers)} samplers, but must have one; export the model again.")
    (sampler,) = samplers
    argmax = ir.Node("", "ArgMax", [sampler.inputs[0]], [ir.AttrInt64("axis", 1), ir.AttrInt64("keepdims", 0)])
    argmax.name = "argmax"
    graph.insert_after(sampler, argmax)
    token, old = argmax.outputs[0], next(value for value in graph.outputs if value.name == "next_token")
    keep = [value for value in graph.outputs if value.name is not None and value.name.startswith("present.")]
    token.type, token.shape = old.type, old.shape
    graph.outputs.clear()
    graph.outputs.extend([token, *keep])
    graph.remove(sampler, safe=True)
    token.name = "next_token"
    inputs = [value for value in graph.inputs if value.name not in TAIL_INPUTS]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    model.functions.clear()
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    share_weights(export, folder)
    ir.save(model, folder / FILE)
    return folder / FILE


def share_weights(export: Path, folder: Path) -> None:
    """Hard-link the data files of `export` into `folder`, else copy them."""
    for data in (path for pattern in ("*.onnx_data*", "*.onnx.data*") for path in export.glob(pattern)):
        try:
            os.link(data, folder / data.name)
        except OSError:
            shutil.copyfile(data, folder / data.name)


class ArgMaxLoop:
    """Greedy decoding of one sequence over the graph of `with_argmax`.

    decoder: the manifest's description of the graph's cache.
    """

    def __init__(self, path: Path, decoder: DecoderInfo, options: ort.SessionOptions) -> None:
        raw = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._session = OrtSession(raw)
        self._caches = caches_of(self._session, decoder)
        self._cache: Cache | None = None
        self._token = np.zeros(1, np.int64)

    @property
    def cache_bytes(self) -> int:
        """Size of the states' memory; 0 before the first prompt, and where onnxruntime owns the cache."""
        return self._caches.bytes

    def prefill(self, prompt: list[int], capacity: int) -> int:
        """Run the prompt; return the first token. capacity: maximum length, prompt included."""
        if self._cache is not None:
            self._cache.close()
        self._binding = self._session.bind()
        self._binding.bind_result("next_token", self._token)
        self._cache = self._caches.open(self._binding, [prompt], [capacity - len(prompt)])
        self._cache.feed_prompts()
        self._binding.run()
        self._cache.begin_decoding()
        return int(self._token[0])

    def step(self) -> int:
        """Feed the last token; return the next."""
        assert self._cache is not None, "prefill comes first"
        self._cache.input_ids[0, 0] = self._token[0]
        self._cache.advance((0,))
        self._binding.run()
        return int(self._token[0])
