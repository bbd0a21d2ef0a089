"""Toy models for the soak test. Their logits are integers times one factor, so that every batch rounds them alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.engine.faults import Faults
from tests.support.toy_model import Toy, byte_ids, export
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions

INVALID_AFTER = byte_ids("!")[0]
"""The logits right after this token are NaN."""
INVALID_STATE = byte_ids("~")[0]
"""The states of this token are NaN, and so are all logits after it."""
_FORMS: dict[str, dict[str, Any]] = {
    "grouped": {"form": "grouped", "with_logits": True},
    "growing": {"form": "scatter", "buffer_step": 16},
}


@dataclass(frozen=True)
class Subject:
    """A model, and the faults of its runs in an engine's thread."""

    name: str
    model: TopWModel
    faults: Faults


def open_subjects(folder: Path, seed: int) -> list[Subject]:
    """Export and open a model with GroupQueryAttention, and one of standard operators with growing buffers.

    Standard operators multiply masked values, so that NaN in an unused slot would spread.
    """
    subjects = []
    for number, (name, form) in enumerate(_FORMS.items()):
        toy = Toy.random(number + 1, options=TopWOptions(top_m=64, metric="mahalanobis"))
        toy.follow[:, [INVALID_AFTER, INVALID_STATE]] = -200  # they come from prompts only
        toy.follow[INVALID_AFTER] = np.nan
        toy.features[INVALID_STATE] = np.nan
        output = export(folder / name, toy, with_mass=True, **form)
        model = TopWModel.from_pretrained(output, provider="cpu", intra_op_num_threads=1)
        subjects.append(Subject(name, model, Faults.of(model, seed + number)))
    return subjects
