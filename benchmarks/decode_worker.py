"""The worker of `benchmarks.decode`: one decoder that ends in Top-W or ArgMax.

The address of the weights changes the speed by several per cent, more than a sampler costs. So both share one graph, of
which an input selects the sampler.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from benchmarks.common import median_step_seconds, share_thread_pool
from topw_deploy.export.sampler.node import OP_TYPE
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.plugins.library import library_path
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.runtime.loop import Batch, accept_tokens, decode_one_token, prefill
from topw_deploy.runtime.ort.graph_session import SAMPLER_INPUTS
from topw_deploy.runtime.ort.session import OrtSession
from topw_deploy.sampling import RuleParameters, TopWParameters

CHOICE = "argmax"  # input, bool
FILE = "either.onnx"
CONTROL = "control"


def write_either(export: Path, folder: Path) -> Path:
    """Write `folder/either.onnx`: `export` with its sampler and ArgMax in an If."""
    model = ir.load(export / "model.onnx")
    graph = model.graph
    (sampler,) = [node for node in graph if node.op_type == OP_TYPE]
    choice = ir.Value(name=CHOICE, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    graph.inputs.append(choice)
    inside = ir.Node(
        sampler.domain, OP_TYPE, list(sampler.inputs), list(sampler.attributes.values()),
        num_outputs=len(sampler.outputs), name="topw_inside",
    )  # fmt: skip
    argmax = ir.Node("", "ArgMax", [sampler.inputs[0]], [ir.AttrInt64("axis", 1), ir.AttrInt64("keepdims", 0)])
    nodes, results = [argmax], [argmax.outputs[0]]
    for value, new in zip(sampler.outputs, inside.outputs, strict=True):
        new.name, new.type, new.shape = f"{value.name}_topw", value.type, value.shape
        if value.name != "next_token":
            assert value.dtype is not None
            nothing = ir.tensor(np.zeros(1, value.dtype.numpy()))
            nodes.append(ir.Node("", "Constant", [], [ir.AttrTensor("value", nothing)]))
            results.append(nodes[-1].outputs[0])
    for value, result in zip(sampler.outputs, results, strict=True):
        result.name, result.type, result.shape = f"{value.name}_argmax", value.type, value.shape
    branches = [
        ir.AttrGraph("then_branch", ir.Graph([], results, nodes=nodes, name="with_argmax")),
        ir.AttrGraph("else_branch", ir.Graph([], list(inside.outputs), nodes=[inside], name="with_topw")),
    ]
    either = ir.Node("", "If", [choice], branches, num_outputs=len(sampler.outputs), name="either")
    graph.insert_after(sampler, either)
    for old, new in zip(sampler.outputs, either.outputs, strict=True):
        name, new.type, new.shape = old.name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = None, name
    graph.remove(sampler, safe=True)
    link_weights(export, folder)
    ir.save(model, folder / FILE)
    return folder / FILE


def link_weights(export: Path, folder: Path) -> None:
    """Hard-link the data files of `export` into `folder`, or copy them where that is impossible."""
    for data in (path for pattern in ("*.onnx_data*", "*.onnx.data*") for path in export.glob(pattern)):
        try:
            os.link(data, folder / data.name)
        except OSError:
            shutil.copyfile(data, folder / data.name)


class EitherSession(OrtSession):
    """A session over the graph of `write_either`.

    native: use the native operator instead of the function in the file.
    """

    def __init__(self, path: Path, *, native: bool) -> None:
        options = ort.SessionOptions()
        options.use_per_session_threads = False  # use the pool made by `start`
        options.log_severity_level = 3
        if native:
            options.register_custom_ops_library(str(library_path()))
        super().__init__(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]))


class TopWLoop:
    """Run the runtime's own loop with Top-W, step by step."""

    def __init__(self, export: Path, session: EitherSession) -> None:
        self.session = session
        self.model = TopWModel(ModelFolder(export, DecoderManifest), session, time.perf_counter())
        self.choice = np.array(False)
        self.certified: list[bool] = []

    def begin(self, prompt: list[int], new_tokens: int) -> None:
        sequences = self.model.prepare([prompt], max_new_tokens=new_tokens + 1, seed=1, ignore_eos=True)
        (self.sequence,) = sequences
        _, caches = self.model._require_open()
        self.batch = Batch(self.session, caches, sequences)
        self.batch.binding.bind_array(CHOICE, self.choice)
        accept_tokens(self.batch, prefill(self.batch))

    def step(self) -> None:
        accept_tokens(self.batch, decode_one_token(self.batch))

    def end(self) -> None:
        """Count the certified steps and free the cache."""
        self.certified += self.batch.outputs(self.sequence, "certified")
        self.batch.close()


class GreedyLoop:
    """A minimal greedy loop over the same graph."""

    def __init__(self, manifest: DecoderManifest, session: EitherSession) -> None:
        self.session, self.caches = session, Caches(session, manifest.decoder)  # type: ignore[arg-type]
        self.token = np.zeros(1, np.int64)
        self.unused: dict[str, np.ndarray] = {
            name: np.zeros((1, 0), np.float32) for name in SAMPLER_INPUTS if name.startswith("edit_")
        }
        self.unused |= {name: np.ones(1, np.float32) for name in TopWParameters.__slots__}
        self.unused |= {"edit_ids": np.zeros((1, 0), np.int64), "uniform": np.zeros(1, np.float32)}
        self.unused["allowed"] = np.zeros((1, 0), np.int32)
        self.unused |= rule_arrays([RuleParameters()])
        self.unused |= {CHOICE: np.array(True)}

    def begin(self, prompt: list[int], new_tokens: int) -> None:
        self.binding = self.session.bind()
        for name, array in self.unused.items():
            self.binding.bind_array(name, array)
        self.binding.bind_result("next_token", self.token)
        self.cache = self.caches.open(self.binding, [prompt], [new_tokens + 1])
        self.cache.feed_prompts()
        self.binding.run()
        self.cache.begin_decoding()

    def step(self) -> None:
        self.cache.input_ids[0, 0] = self.token[0]
        self.cache.advance((0,))
        self.binding.run()

    def end(self) -> None:
        self.cache.close()


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: export, either (from `write_either`), samplers, threads."""
    share_thread_pool(settings["threads"])
    loops: dict[str, TopWLoop | GreedyLoop] = {}
    for name in settings["samplers"]:
        session = EitherSession(Path(settings["either"]), native=name == "native")
        topw = TopWLoop(Path(settings["export"]), session)
        loops |= {name: topw, f"{name} {CHOICE}": GreedyLoop(topw.model.manifest, session)}
    # A second ArgMax, which does the same work as the last, shows the error of the measurement.
    loops[CONTROL] = GreedyLoop(topw.model.manifest, session)

    def prefill(name: str, prompt: list[int], room: int) -> float:
        began = time.perf_counter()
        loops[name].begin(prompt, room)
        return time.perf_counter() - began

    def certified() -> float:
        """End all sequences. Returns the share of certified steps so far."""
        for loop in loops.values():
            loop.end()
        every = [step for loop in loops.values() if isinstance(loop, TopWLoop) for step in loop.certified]
        return sum(every) / len(every)

    return {
        "names": lambda: list(loops),
        "prefill": prefill,
        "turn": lambda name, steps: median_step_seconds(loops[name].step, steps),
        "certified": certified,
    }
