"""A decoder graph and its description."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.manifest import DecoderInfo


@dataclass(frozen=True)
class Decoder:
    """The decoder that each stage of an export passes to the next.

    The stages share one `model` and edit it in place: lowering replaces the trace's placeholders, quantising replaces
    weights and their products, and grafting adds the sampler's inputs, node and outputs and tidies a traced graph.
    Nothing edits it afterwards. Other fields change only in copies.

    model: inputs input_ids, past_key_values.{i}.key|value and either attention_mask and (position_ids) or, with a
        static cache, write_indices and row_lengths; outputs logits [batch, sequence, vocab] and
        present.{i}.key|value.
    info: its description in the manifest.
    foreign: whether another exporter made it; its nodes then stay as they are.
    notices: sentences for the user about what the decoder lacks or changes.
    """

    model: ir.Model
    info: DecoderInfo
    foreign: bool
    notices: tuple[str, ...] = ()

    def with_notices(self, *notices: str) -> Decoder:
        """A copy with these notices after its own."""
        return replace(self, notices=(*self.notices, *notices))

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Raises UnsupportedModelError if it is symbolic."""
        logits = next(value for value in self.model.graph.outputs if value.name == "logits")
        width = logits.shape[-1] if logits.shape is not None else None
        if not isinstance(width, int):
            raise UnsupportedModelError(
                f"the decoder's logits have the shape {logits.shape}, but their last dimension must be a number; "
                "export the decoder with a fixed vocabulary."
            )
        return width

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return int(self.model.opset_imports[""])
