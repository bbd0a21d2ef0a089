"""What every route hands to the graft: a decoder graph and the facts the runtime must know about it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.manifest import DecoderInfo


@dataclass
class Decoder:
    """`model` has the inputs input_ids, past_key_values.{i}.key|value, and attention_mask, (position_ids) or, if its
    cache is static, write_indices, row_lengths; the outputs logits [batch, sequence, vocab], present.{i}.key|value.
    `foreign`: written by another exporter, so left as it is."""

    model: ir.Model
    info: DecoderInfo
    foreign: bool

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
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
