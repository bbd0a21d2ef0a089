"""A decoder graph and its description."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.manifest import DecoderInfo


@dataclass
class Decoder:
    """The decoder that each stage of an export passes to the next, which edits it in place.

    model: inputs input_ids, past_key_values.{i}.key|value and either attention_mask and (position_ids) or, with a
        static cache, write_indices and row_lengths; outputs logits [batch, sequence, vocab] and
        present.{i}.key|value. Quantising replaces weights and their products; attaching the sampler adds its inputs,
        node and outputs.
    info: its description in the manifest.
    foreign: whether another exporter made it; its nodes then stay as they are.
    notices: sentences for the user about what the decoder lacks or changes.
    """

    model: ir.Model
    info: DecoderInfo
    foreign: bool
    notices: list[str] = field(default_factory=list)

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
