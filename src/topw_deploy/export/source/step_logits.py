"""Logits of a model that the exporter does not run."""

from __future__ import annotations

from pathlib import Path

from topw_deploy.errors import SourceError
from topw_deploy.export.source.npy_files import mapped_array
from topw_deploy.sampling import Geometry, median_distance

MOST_STEPS = 4096
"""Rows of the file: each takes 32 kB while the median is computed."""


def median_of_file(path: Path, geometry: Geometry, vocab_size: int) -> float:
    """The median distance of likely pairs (sampling.likely_pairs) at the steps whose logits are in the .npy `path`.

    The file holds floating-point numbers [steps, vocab_size], with at most MOST_STEPS steps. Raises SourceError for
    other files, and if there is no median.
    """
    rows = mapped_array(path, "the logits")
    if rows.ndim != 2 or rows.shape[1] != vocab_size or not 1 <= len(rows) <= MOST_STEPS or rows.dtype.kind != "f":
        raise SourceError(
            f"{path} holds {rows.dtype} of shape {tuple(rows.shape)}, but must hold floating-point logits of shape "
            f"[steps, {vocab_size}], with 1 to {MOST_STEPS} steps; give such logits."
        )
    found = median_distance(geometry, rows)
    if found is None:
        raise SourceError(
            f"the logits in {path} have no two likely tokens at a distance > 0 in any row; give a model's logits at "
            "steps of ordinary texts."
        )
    return found
