"""The options, inputs, outputs and attributes of a sampler node (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from topw_deploy.errors import ParameterError
from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.rules import RULES, carried_rules

DOMAIN = "topw"
OP_TYPE = "TopWSample"
DOMAIN_VERSION = 1
OLDEST_OPSET, NEWEST_OPSET = 18, 24
LARGEST_VOCABULARY = 1 << 24
"""The largest vocabulary: the function passes token ids as float32, which holds every integer up to it."""

SAMPLER_INPUTS = (
    "logits",
    "edit_ids",
    "edit_penalty",
    "edit_bias",
    "allowed",
    "temperature",
    "selection_temperature",
    "lam",
    "beta",
    "init_top_p",
    "geom_scale",
    "uniform",
    "rule",
    "rule_values",
)
"""Inputs of every `topw::TopWSample` node, in order: int64 for edit_ids, int32 for allowed and rule, else float32.

logits [batch, vocab]; the three edit inputs [batch, edits] with edits >= 0; allowed [batch, words] with 0 or
ceil(vocab / 32) words; rule_values [batch, 2]; the rest [batch].
"""

GEOMETRY_INPUTS = ("mean", "inverse_std", "neighbour_bound")
"""Further inputs if the metric needs embeddings, all float32; after them come the embedding node's data inputs.

mean, inverse_std: [hidden], statistics of the table.
neighbour_bound: [vocab], a lower bound of each token's distance to its nearest neighbour; [0] for none.
"""


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """The options of one sampler node, fixed at export.

    options: Top-W's options.
    vocab_size: width of the logits, 1 to LARGEST_VOCABULARY.
    embedding: the decoder's embedding lookup; optional for the `uniform` metric.
    hidden_size: width of the embeddings; optional for the `uniform` metric.
    branches: whether the function skips work that a batch does not need, by `If`. Without, it has no control flow.
    opset: 18 to 24.
    with_mass: whether the node has the output `mass`.
    with_keep_mask: whether the node has the output `keep_mask`.
    rules: the names of the sampling rules that the function carries. Top-W is added if missing. A row with another rule
        is invalid.

    Raises ParameterError for a value out of range.
    """

    options: TopWOptions
    vocab_size: int
    embedding: EmbeddingForm | None = None
    hidden_size: int | None = None
    branches: bool = True
    opset: int = 23
    with_mass: bool = False
    with_keep_mask: bool = False
    rules: tuple[str, ...] = tuple(RULES)

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise ParameterError(
                f"vocab_size is {self.vocab_size}, but must be an integer in 1..{LARGEST_VOCABULARY}.", "vocab_size"
            )
        object.__setattr__(self, "rules", carried_rules(self.rules))
        if not OLDEST_OPSET <= self.opset <= NEWEST_OPSET:
            raise ParameterError(
                f"opset is {self.opset}, but the sampler needs {OLDEST_OPSET} to {NEWEST_OPSET}; convert the model.",
                "opset",
            )
        if self.has_geometry and (self.embedding is None or self.hidden_size is None):
            raise ParameterError(
                f"metric {self.options.metric!r} needs the embedding table and its width; give both or use 'uniform'."
            )

    @property
    def has_geometry(self) -> bool:
        """Whether the metric needs embeddings."""
        return self.options.metric != "uniform"

    @property
    def lookup(self) -> EmbeddingForm | None:
        """`embedding` if the metric needs it, else None."""
        return self.embedding if self.has_geometry else None

    @property
    def carries_rules(self) -> bool:
        """Whether the function carries rules other than Top-W."""
        return len(self.rules) > 1

    @cached_property
    def pool_size(self) -> int:
        """The number of tokens in the pool."""
        return min(self.options.top_m, self.vocab_size)


def sampler_inputs(spec: SamplerSpec) -> tuple[str, ...]:
    """The names of the node's inputs, in order; those of the embedding node are called `embedding_0`, `embedding_1`…"""
    if spec.lookup is None:
        return SAMPLER_INPUTS
    return (*SAMPLER_INPUTS, *GEOMETRY_INPUTS, *(f"embedding_{i}" for i in range(len(spec.lookup.inputs))))


def sampler_outputs(spec: SamplerSpec) -> tuple[str, ...]:
    """The names of the node's outputs, in order.

    next_token int64, logprob float32, kept int32 and certified bool, all [batch]. Then, if requested, mass float32
    [batch] and keep_mask bool [batch, vocab].
    """
    optional = (("mass", spec.with_mass), ("keep_mask", spec.with_keep_mask))
    return ("next_token", "logprob", "kept", "certified", *(name for name, wanted in optional if wanted))


def sampler_attributes(spec: SamplerSpec) -> dict[str, str | int]:
    """The node's attributes, which native kernels read; the function's body ignores them.

    plugin_namespace, plugin_version: TensorRT finds its plugin by them.
    knn_k: 0 for the potential `nearest`.
    with_mass, with_keep_mask: TensorRT derives the number of outputs from them.
    """
    return {
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        "top_m": spec.options.top_m,
        "alt_iters": spec.options.alt_iters,
        "metric": spec.options.metric,
        "knn_k": spec.options.neighbours,
        "table_form": spec.lookup.form if spec.lookup is not None else "",
        "with_mass": int(spec.with_mass),
        "with_keep_mask": int(spec.with_keep_mask),
    }
