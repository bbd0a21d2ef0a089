"""What a tail is made for: the numbers and choices that an export fixes, and the node that they give.

The contract is docs/contract/graph.md, section 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from topw_deploy.errors import ParameterError
from topw_deploy.export.tail.embedding import EmbeddingForm
from topw_deploy.sampling.parameters import TopWOptions

DOMAIN = "topw"
OP_TYPE = "TopWSample"
DOMAIN_VERSION = 1
FORMS = ("portable", "onnxruntime", "static")
OLDEST_OPSET, NEWEST_OPSET = 18, 24

TAIL_INPUTS = (
    "logits",
    "edit_ids",
    "edit_penalty",
    "edit_bias",
    "temperature",
    "selection_temperature",
    "lam",
    "beta",
    "init_top_p",
    "geom_scale",
    "uniform",
)
"""Inputs of every `topw::TopWSample` node, in order: float32 but edit_ids (int64).

logits [batch, vocab]; the three edit inputs [batch, edits] with edits >= 0; the rest [batch].
"""

GEOMETRY_INPUTS = ("mean", "inverse_std", "neighbour_bound")
"""Further inputs where the metric needs embeddings: mean [hidden] and inverse standard deviation [hidden] of the
table, float32, and float32 [vocab] lower bounds of each token's distance to its nearest neighbour, or [0] for none.
The embedding node's data inputs follow."""


@dataclass(frozen=True, kw_only=True)
class TailSpec:
    """One tail: what is baked into it and which outputs it has.

    options: pool size, alternations, metric and potential.
    vocab_size: width V of the logits, >= 1.
    embedding: how to look embedding rows up; None for the `uniform` metric only.
    hidden_size: width d of an embedding row; None for the `uniform` metric only.
    form: `portable` (branches one after the other around static shapes), `onnxruntime` (nested branches, dynamic
        shapes) or `static` (no control flow).
    opset: version of the standard operators, that of the model around it, 18 to 24.
    with_mass, with_keep_mask: whether to add these outputs.

    Raises ParameterError naming the field, its value and what is allowed.
    """

    options: TopWOptions
    vocab_size: int
    embedding: EmbeddingForm | None = None
    hidden_size: int | None = None
    form: str = "portable"
    opset: int = 23
    with_mass: bool = False
    with_keep_mask: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ParameterError(f"vocab_size is {self.vocab_size}, but must be an integer >= 1.", "vocab_size")
        if self.form not in FORMS:
            raise ParameterError(f"tail is {self.form!r}, but must be one of {', '.join(FORMS)}.", "tail")
        if not OLDEST_OPSET <= self.opset <= NEWEST_OPSET:
            raise ParameterError(
                f"opset is {self.opset}, but the tail is written for {OLDEST_OPSET} to {NEWEST_OPSET}; "
                "convert the model.",
                "opset",
            )
        if self.has_geometry and (self.embedding is None or self.hidden_size is None):
            raise ParameterError(
                f"metric {self.options.metric!r} needs the embedding table and its width; give both or use 'uniform'."
            )

    @property
    def has_geometry(self) -> bool:
        """Whether distances come from embeddings."""
        return self.options.metric != "uniform"

    @cached_property
    def pool_size(self) -> int:
        """top_m cut to the vocabulary."""
        return min(self.options.top_m, self.vocab_size)


def tail_inputs(spec: TailSpec) -> tuple[str, ...]:
    """Names of the node's inputs in order, the embedding node's data inputs as `embedding_0`, `embedding_1`, ..."""
    if not spec.has_geometry or spec.embedding is None:
        return TAIL_INPUTS
    return (*TAIL_INPUTS, *GEOMETRY_INPUTS, *(f"embedding_{i}" for i in range(len(spec.embedding.inputs))))


def tail_outputs(spec: TailSpec) -> tuple[str, ...]:
    """Names of the node's outputs in order.

    next_token int64 [batch], logprob float32 [batch], kept int32 [batch], certified bool [batch]; on request mass
    float32 [batch] and keep_mask bool [batch, vocab].
    """
    optional = (("mass", spec.with_mass), ("keep_mask", spec.with_keep_mask))
    return ("next_token", "logprob", "kept", "certified", *(name for name, wanted in optional if wanted))


def tail_attributes(spec: TailSpec) -> dict[str, str | int]:
    """Attributes of the node: what a native kernel must know, the function's body has it built in.

    `plugin_namespace` and `plugin_version` are how TensorRT finds a plugin; `knn_k` is 0 for `nearest`;
    `table_form` is empty for the `uniform` metric; `with_mass` and `with_keep_mask` (0 or 1) say which outputs there
    are, since TensorRT asks a plugin for their number and tells it nothing but attributes and inputs.
    """
    return {
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        "top_m": spec.options.top_m,
        "alt_iters": spec.options.alt_iters,
        "metric": spec.options.metric,
        "knn_k": spec.options.neighbours,
        "table_form": spec.embedding.form if spec.has_geometry and spec.embedding is not None else "",
        "with_mass": int(spec.with_mass),
        "with_keep_mask": int(spec.with_keep_mask),
    }
