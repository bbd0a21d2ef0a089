"""Sampler-only models in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from tests.support.function_cases import Scenario, embedding_table
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.sampler.spec import SamplerSpec
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.sampling import FLOAT32_TIES, Geometry, sample_row
from topw_deploy.sampling.parameters import TopWOptions


@dataclass(frozen=True)
class Wanted:
    """The options of a model.

    branches: whether the function has branches.
    mass, keep_mask: optional outputs.
    dtype: of the table.
    """

    options: TopWOptions = field(default_factory=lambda: TopWOptions(top_m=40, metric="cosine"))
    vocab_size: int = 300
    hidden_size: int = 8
    branches: bool = True
    mass: bool = False
    keep_mask: bool = False
    dtype: Any = np.float32
    opset: int = 18

    @property
    def table(self) -> np.ndarray:
        scenario = Scenario(self.options, self.vocab_size, self.hidden_size, "clusters", 0)
        return embedding_table(scenario).astype(self.dtype)

    @property
    def geometry(self) -> Geometry:
        if self.options.metric == "uniform":
            return Geometry.uniform()
        return Geometry.from_embeddings(self.table.astype(np.float32), self.options.metric)

    def model(self) -> onnx.ModelProto:
        """A new copy, which the caller may change."""
        copied = onnx.ModelProto()
        copied.CopyFrom(self._built())
        return copied

    @cache  # noqa: B019  # few are made
    def _built(self) -> onnx.ModelProto:
        uniform, table = self.options.metric == "uniform", self.table
        spec = SamplerSpec(
            options=self.options,
            vocab_size=self.vocab_size,
            embedding=None if uniform else plain_gather(*table.shape, dtype=ir.tensor(table).dtype),
            hidden_size=None if uniform else self.hidden_size,
            branches=self.branches,
            opset=self.opset,
            with_mass=self.mass,
            with_keep_mask=self.keep_mask,
        )
        return ir.to_proto(sampler_model(spec, None if uniform else table, self.geometry))


def open_model(model: onnx.ModelProto, native: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    """A CPU session over the function, or the operator of the library `native`."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if native is not None:
        options.register_custom_ops_library(str(native))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def node_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "TopWSample")


def set_attribute(model: onnx.ModelProto, name: str, value: Any) -> None:
    """Set an attribute of the sampler's node."""
    node = node_of(model)
    for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def clear_rows(wanted: Wanted, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """bool [batch]: rows that float32 rounding cannot change."""
    names = ("lam", "beta", "temperature", "selection_temperature", "init_top_p", "geom_scale")
    clear = []
    for index, logits in enumerate(inputs["logits"]):
        parameters = {name: float(inputs[name][index]) for name in names}
        uniform, words = float(inputs["uniform"][index]), inputs["allowed"][index]
        allowed = words if len(words) else None
        row = sample_row(
            logits, parameters, wanted.options, wanted.geometry, uniform, allowed=allowed,
            rule=int(inputs["rule"][index]), rule_values=inputs["rule_values"][index].tolist(),
        )  # fmt: skip
        ties = row.ties.allow_other_set(FLOAT32_TIES) or row.ties.allow_other_certified(FLOAT32_TIES)
        clear.append(row.is_valid and not ties and row.draw_margin > FLOAT32_TIES.draw)
    return np.array(clear)
