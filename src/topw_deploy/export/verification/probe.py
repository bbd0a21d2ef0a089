"""Sessions of an exported decoder or an exported sampler alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.errors import VerificationError
from topw_deploy.export.graph import GraphEditor, external_files, required_node_input
from topw_deploy.export.sampler.attach import NODE_NAME, sampler_node
from topw_deploy.export.sampler.spec import SAMPLER_INPUTS
from topw_deploy.export.verification.cache_drivers import cache_driver
from topw_deploy.manifest import MODEL_NAME, DecoderInfo
from topw_deploy.runtime.inputs import RuleInputs
from topw_deploy.sampling.rules import RuleParameters

LOGITS = "topw.probe.logits"


def open_graph(folder: Path, model: ir.Model, library: Path | None = None) -> ort.InferenceSession:
    """Open a session of `model`, a part of the export's graph.

    A graph with data files is written to a temporary file beside them. Raises VerificationError if the folder cannot be
    written.

    folder: of the export.
    library: see `open_session`.
    """
    if not external_files(model):
        return open_session(ir.to_proto(model).SerializeToString(), library)
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".topw-probe-", suffix=".onnx")
    except OSError as error:
        raise VerificationError(
            f"{folder} cannot be written ({error.strerror}), but verification needs a temporary file there; "
            "copy the folder and verify the copy."
        ) from error
    os.close(handle)
    try:
        ir.save(model, name)
        return open_session(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def open_session(model: str | bytes, library: Path | None = None) -> ort.InferenceSession:
    """Open a session of the CPU provider, whose results differ between machines only by rounding.

    model: a file or its content.
    library: the native sampler's library, which replaces the file's function; None for the function.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class LogitsProbe:
    """The exported decoder without its sampler: ids go in, the sampler's input `logits` comes out."""

    def __init__(self, folder: Path, decoder: DecoderInfo) -> None:
        self._driver = cache_driver(open_graph(folder, _decoder_model(folder)), decoder, LOGITS)

    def start(self, batch: int) -> None:
        """See `CacheDriver.start`."""
        self._driver.start(batch)

    def step(self, ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """See `CacheDriver.step`."""
        return self._driver.step(ids, attention_mask)


def _decoder_model(folder: Path) -> ir.Model:
    """The export's graph with the logits and the cache as outputs, and without sampler."""
    model = ir.load(folder / MODEL_NAME)
    graph = model.graph
    node = sampler_node(graph)
    logits = required_node_input(node.inputs[0])
    editor = GraphEditor(graph, "topw.probe")
    output = editor.op("Identity", [logits], dtype=ir.DataType.FLOAT, shape=["batch", None], name=LOGITS)
    cache = [value for value in graph.outputs if (value.name or "").startswith("present.")]
    graph.outputs.clear()
    graph.outputs.extend([output, *cache])
    RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if value.name in SAMPLER_INPUTS]:
        graph.inputs.remove(value)
    editor.finish()
    return model


class SamplerProbe:
    """The exported sampler without its decoder. library: see `open_session`."""

    def __init__(self, folder: Path, library: Path | None = None) -> None:
        self._session = open_graph(folder, _sampler_model(folder), library)
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(
        self,
        logits: np.ndarray,
        parameters: Sequence[dict[str, float]],
        uniform: Sequence[float],
        allowed: np.ndarray | None = None,
        rules: Sequence[RuleParameters] | None = None,
    ) -> dict[str, Any]:
        """Sample once. Returns the node's outputs by name.

        logits: float32 [batch, vocab].
        parameters: Top-W's parameters of each row.
        uniform: the uniform number of each row.
        allowed: the masks, int32 [batch, words]; None allows all tokens.
        rules: the rule of each row; None for Top-W.
        """
        batch = len(logits)
        chosen = RuleInputs(batch)
        for row, rule in enumerate(rules or ()):
            chosen.set(row, rule)
        feeds: dict[str, np.ndarray] = {
            "logits": np.ascontiguousarray(logits, dtype=np.float32),
            "edit_ids": np.zeros((batch, 0), np.int64),
            "edit_penalty": np.zeros((batch, 0), np.float32),
            "edit_bias": np.zeros((batch, 0), np.float32),
            "allowed": np.zeros((batch, 0), np.int32) if allowed is None else allowed,
            "uniform": np.asarray(uniform, dtype=np.float32),
            **chosen.arrays,
        }
        for name in parameters[0]:
            feeds[name] = np.asarray([row[name] for row in parameters], dtype=np.float32)
        return dict(zip(self._outputs, self._session.run(None, feeds), strict=True))


def _sampler_model(folder: Path) -> ir.Model:
    """The export's graph with an input `logits` in place of the decoder."""
    model = ir.load(folder / MODEL_NAME)
    graph = model.graph
    node = next(node for node in graph if node.name == NODE_NAME)
    editor = GraphEditor(graph, "topw.probe")
    old = node.inputs[0]
    width = old.shape[-1] if old is not None and old.shape is not None else None
    vocab = width if isinstance(width, int) else "vocab"
    # The name of the new input may belong to an output of the decoder.
    for value in graph.outputs:
        if value.name == "logits":
            value.name = "topw.probe.old_logits"
    if old is not None and old.name == "logits":
        old.name = "topw.probe.old_logits"
    logits = editor.input("logits", ir.DataType.FLOAT, ["batch", vocab])
    graph.outputs.clear()
    if old is not None:
        ir.convenience.replace_all_uses_with(old, logits)  # also by the nodes that `add_defaults` added
    graph.outputs.extend(node.outputs)
    RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if value.name not in SAMPLER_INPUTS]:
        graph.inputs.remove(value)
    editor.finish()
    return model
