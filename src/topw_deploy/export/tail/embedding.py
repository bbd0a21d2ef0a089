"""How a decoder looks its embedding table up, so that the tail can ask the same table for other rows."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError

AttributeValue = int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The decoder's embedding node without its tensors: enough to write the same node once more.

    domain, op_type: the operator, e.g. "" and "Gather" or "com.microsoft" and "GatherBlockQuantized".
    attributes: (name, value) pairs as the decoder's node carries them.
    inputs: (element type, shape) of the node's data inputs in their order, the token ids left out.
    indices_position: where among the node's inputs the token ids stand.

    The node must map ids [...] to rows [..., hidden] for any shape of ids.
    """

    domain: str
    op_type: str
    attributes: tuple[tuple[str, AttributeValue], ...]
    inputs: tuple[tuple[ir.DataType, tuple[int, ...]], ...]
    indices_position: int

    def __post_init__(self) -> None:
        if not 0 <= self.indices_position <= len(self.inputs):
            raise UnsupportedModelError(
                f"the embedding node {self.op_type} has its indices at input {self.indices_position}, "
                f"but only {len(self.inputs)} data inputs; describe the node again."
            )
        if self.op_type == "Gather" and not self.domain and dict(self.attributes).get("axis", 0) != 0:
            raise UnsupportedModelError(
                f"the embedding node is a Gather over axis {dict(self.attributes)['axis']}, but rows of tokens need "
                "axis 0; transpose the table before exporting."
            )

    @property
    def form(self) -> str:
        """Canonical text of the operator, the node attribute `table_form`, e.g. `Gather(axis=0)`.

        Attributes stand in alphabetical order, so equal operators have equal texts. Kernels compare it to the
        forms that they know.
        """
        attributes = dict(self.attributes)
        if self.op_type == "Gather" and not self.domain:
            attributes.setdefault("axis", 0)
        name = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"{name}({','.join(f'{key}={attributes[key]}' for key in sorted(attributes))})"


def plain_gather(rows: int, hidden: int, dtype: ir.DataType = ir.DataType.FLOAT) -> EmbeddingForm:
    """The usual embedding: Gather(axis=0) over one table [rows, hidden] of float32, float16 or bfloat16."""
    return EmbeddingForm("", "Gather", (("axis", 0),), ((dtype, (rows, hidden)),), 1)
