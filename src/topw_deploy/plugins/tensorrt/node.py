"""The sampler node in TensorRT's terms: attributes, types and shapes (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES, array_name
from topw_deploy.errors import PluginError
from topw_deploy.plugins.shared_library import CUDA_ABI_VERSION
from topw_deploy.plugins.structs import COLUMNS
from topw_deploy.sampling.parameters import METRICS
from topw_deploy.sampling.row import mask_words

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

TABLE_FORM = "Gather(axis=0)"
"""The only table form that TensorRT's parser supports."""

EDITS = ("edit_ids", "edit_penalty", "edit_bias")
MASK = "allowed"
RULE = ("rule", "rule_values")
INPUTS = ("logits", *EDITS, MASK, *COLUMNS, *RULE)
"""Inputs of a node with the `uniform` metric."""
TABLE_INPUTS = ("mean", "inverse_std", "neighbour_bound", "table")
"""Additional inputs under every other metric."""

OUTPUT_TYPES = {name: array_name(dtype) for name, dtype in SAMPLER_OUTPUT_TYPES.items()}
"""Name of an output -> its type, in order; the last two are optional."""

MOST_POOL, MOST_NEIGHBOURS, MOST_VOCAB, MOST_HIDDEN = 4096, 16, 524288, 8192
"""Limits of the kernels (topw_cuda_refusal of topw_cuda.h), for checks without the library."""

KERNELS = "kernels"
"""The engine's field for the version of the kernels' interface, CUDA_ABI_VERSION. It is not an attribute."""
_NUMBERS = ("top_m", "alt_iters", "knn_k", "with_mass", "with_keep_mask")
_TEXTS = ("metric", "table_form")
FIELDS = (*_NUMBERS, *_TEXTS)
"""The plugin's attributes, in the order in which an engine serializes them before KERNELS, also from C++."""
_LARGEST_INT32 = 2**31 - 1  # an int32 in the engine


@dataclass(frozen=True, kw_only=True)
class NodeAttributes:
    """The node's attributes. Raises PluginError, with value and bound, for unsupported ones."""

    top_m: int
    alt_iters: int
    metric: str
    knn_k: int
    with_mass: int
    with_keep_mask: int
    table_form: str = ""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("top_m", 1, _LARGEST_INT32), ("alt_iters", 1, _LARGEST_INT32), ("knn_k", 0, _LARGEST_INT32),
            ("with_mass", 0, 1), ("with_keep_mask", 0, 1),
        ):  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise PluginError(f"the node's {name} is {getattr(self, name)}, but must be in [{least}, {most}].")
        if self.metric not in METRICS:
            raise PluginError(f"the node's metric is {self.metric!r}, but must be one of {', '.join(METRICS)}.")
        wanted = TABLE_FORM if self.has_table else ""
        if self.table_form != wanted:
            raise PluginError(
                f"the node's table form is {self.table_form!r}, but the plugin reads {wanted!r}; without the plugin "
                "TensorRT inlines the node's function."
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, int | str]) -> Self:
        """Read a node's attributes or an engine's fields. Ignores unknown names.

        Raises PluginError for a missing name, a wrong type and an unsupported value.
        """
        known: dict[str, int | str] = {name: fields[name] for name in FIELDS if name in fields}
        for name, value in known.items():
            if isinstance(value, str) != (name in _TEXTS):
                raise PluginError(f"the node's {name} is {value!r}, which has the wrong type; export the model again.")
        missing = [name for name in (*_NUMBERS, "metric") if name not in known]
        if missing:
            raise PluginError(f"the node has no {', '.join(missing)}; export the model again.")
        return cls(**known)  # type: ignore[arg-type]

    def attribute_fields(self) -> dict[str, int | str]:
        """The attributes by name, in the order of FIELDS."""
        values = asdict(self)
        return {name: values[name] for name in FIELDS}

    def exceeded_limit(self, vocab: int = 1, hidden: int = 1) -> str:
        """Which limit of the kernels a table [vocab, hidden] or an attribute exceeds, as a clause; "" if none."""
        for what, value, most in (
            ("top_m", min(self.top_m, vocab), MOST_POOL), ("knn_k", self.knn_k, MOST_NEIGHBOURS),
            ("the vocabulary", vocab, MOST_VOCAB), ("the table's width", hidden, MOST_HIDDEN),
        ):  # fmt: skip
            if value > most:
                return f"{what} is {value}, and the kernels support at most {most}"
        return ""

    def engine_fields(self) -> dict[str, int | str]:
        """The fields of an engine: `attribute_fields` and KERNELS."""
        return {**self.attribute_fields(), KERNELS: CUDA_ABI_VERSION}

    @property
    def has_table(self) -> bool:
        return self.metric != "uniform"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input names, in order."""
        return (*INPUTS, *TABLE_INPUTS) if self.has_table else INPUTS

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output names, in order."""
        wanted = {"mass": self.with_mass, "keep_mask": self.with_keep_mask}
        return tuple(name for name in OUTPUT_TYPES if wanted.get(name, 1))


def check_engine(fields: Mapping[str, int | str]) -> None:
    """Raises PluginError for an engine built with another kernel interface version.

    Such kernels might write beyond the engine's workspace.
    """
    found = fields.get(KERNELS, "unknown")
    if found != CUDA_ABI_VERSION:
        raise PluginError(
            f"the engine was built with version {found} of the kernels' interface, but {CUDA_ABI_VERSION} is needed; "
            "build the engine again."
        )


@dataclass(frozen=True)
class TensorDesc:
    """The type and the shape of an input.

    dtype: NumPy's name, or `bfloat16`.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """The sizes and types of a call, as in topw_cuda_shape.

    words: words of a row's mask.
    tokens, hidden: rows and columns of the table; 0 without a table.
    bounds: number of neighbour bounds, 0 or `vocab`.
    """

    node: NodeAttributes
    batch: int
    vocab: int
    edits: int
    logits_type: str
    words: int = 0
    tokens: int = 0
    hidden: int = 0
    table_type: str = "float32"
    bounds: int = 0


def read_call_shape(node: NodeAttributes, tensors: Sequence[TensorDesc]) -> CallShape:
    """Read the shape of a call from its inputs, in order. Raises PluginError if they do not fit the node."""
    if len(tensors) != len(node.inputs):
        raise PluginError(f"the node has {len(tensors)} inputs, but its attributes require {len(node.inputs)}.")
    given = dict(zip(node.inputs, tensors, strict=True))
    batch, vocab = _matrix_shape("logits", given["logits"])
    _, edits = _matrix_shape("edit_ids", given["edit_ids"])
    _, words = _matrix_shape(MASK, given[MASK])
    if words:
        _check_shape(MASK, given[MASK], (batch, mask_words(vocab)))
    rows = {**dict.fromkeys((*COLUMNS, "rule"), (batch,)), "rule_values": (batch, 2)}
    for name, shape in {**dict.fromkeys(EDITS, (batch, edits)), **rows}.items():
        _check_shape(name, given[name], shape)
    logits_type = given["logits"].dtype
    call = CallShape(node=node, batch=batch, vocab=vocab, edits=edits, logits_type=logits_type, words=words)
    if not node.has_table:
        return call
    tokens, hidden = _matrix_shape("table", given["table"])
    if tokens < vocab:
        raise PluginError(f"the table has {tokens} rows, but needs one for each of {vocab} tokens.")
    _check_shape("mean", given["mean"], (hidden,))
    _check_shape("inverse_std", given["inverse_std"], (hidden,))
    bounds = given["neighbour_bound"].shape
    if bounds != (0,):
        _check_shape("neighbour_bound", given["neighbour_bound"], (vocab,))
    return replace(call, tokens=tokens, hidden=hidden, table_type=given["table"].dtype, bounds=bounds[0])


def _matrix_shape(name: str, tensor: TensorDesc) -> tuple[int, ...]:
    if len(tensor.shape) != 2:
        raise PluginError(f"{name} has shape {list(tensor.shape)}, but must have two dimensions.")
    return tensor.shape


def _check_shape(name: str, tensor: TensorDesc, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise PluginError(f"{name} has shape {list(tensor.shape)}, but must be {list(shape)}.")
