"""The logits of one step, recomputed for inspection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.logprobs import logits_output
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.row_inputs import Edits
from topw_deploy.sampling import apply_edits

Logits = NDArray[np.float32]


def gives_logits(manifest: DecoderManifest) -> bool:
    """Whether the graph has the output `logits` (`--with-logits`), in a type that numpy reads."""
    spec = logits_output(manifest)
    return spec is not None and bool(ELEMENT_TYPES[spec.dtype].numpy)


def edited_logits(logits: Logits, request: RowRequest, drawn: Sequence[int]) -> Logits:
    """The logits [V] with the penalties, biases, bans and limits of a request that has drawn `drawn`."""
    edits = Edits([request])
    if edits.active:
        for token in drawn:
            edits.add(0, token)
        edits.write(0)
        logits = apply_edits(logits, edits.ids[0], edits.penalty[0], edits.bias[0])
    if request.allowed_token_ids:
        allowed = np.zeros(len(logits), np.bool_)
        allowed[list(request.allowed_token_ids)] = True
        logits = np.where(allowed, logits, np.float32(-np.inf))
    return logits
