"""Refuse configurations that state far larger models than the weights beside them.

transformers allocates the model that config.json states before it looks at the weights: a list of all layers, a name
for each label, and values for each tensor whose stored size differs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.configuration import MOST_JSON
from topw_deploy.export.source.quantised import QuantisedCheckpoint
from topw_deploy.export.source.safetensors_files import stored_tensors
from topw_deploy.folders import read_bounded

MOST_PARTS = 4096
"""The maximum number of layers, experts or labels. Published models have up to 126, 512 and 1000."""
_PARTS = re.compile(r"(n|num|moe_num|encoder|decoder)_(\w+_)?(layers?|experts)|num_labels|depth")
_WEIGHTS = ("*.safetensors", "*.bin")
# The model may have twice the stored parameters, because tied embeddings are stored once, and some more, because
# files may lack small ones.
_MOST_TIMES, _SPARE = 2, 1 << 20


def check_counts(folder: Path) -> None:
    """Raises UnsupportedModelError if config.json states more than MOST_PARTS layers, experts or labels.

    Ignores a file that cannot be read, because transformers reports what is wrong with such a file.
    """
    try:
        config = json.loads(read_bounded(folder / "config.json", MOST_JSON, follow=True))
        stated = [(name, value) for name, value in _numbers(config) if value > MOST_PARTS and _PARTS.fullmatch(name)]
    except (OSError, ValueError, RecursionError):
        return
    if stated:
        name, value = stated[0]
        raise UnsupportedModelError(
            f"{folder / 'config.json'} states {name} {value!r:.40}, but at most {MOST_PARTS} is supported; correct it, "
            "or fetch it again."
        )


def _numbers(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and value of every integer field, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, int):
                yield name, inner
            else:
                yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)


def check_sizes(folder: Path, make: Callable[[], torch.nn.Module], quantised: QuantisedCheckpoint | None) -> None:
    """Raises SourceError if the model has far more parameters than the weights in `folder`.

    make: returns the model without values. A model whose code needs values, so that `make` fails, is not checked.
    """
    held = _parameters_in(folder, quantised)
    try:
        stated = sum(parameter.numel() for parameter in make().parameters())
    except Exception:  # noqa: BLE001  # foreign code; loading reports it
        return
    if stated > _MOST_TIMES * held + _SPARE:
        raise SourceError(
            f"the configuration in {folder} states a model of {stated} parameters, but the weights have {held}; fetch "
            "both again."
        )


def _parameters_in(folder: Path, quantised: QuantisedCheckpoint | None) -> int:
    """Return the number of stored parameters.

    For files that only transformers can read, return their bytes, a bound.
    """
    if quantised is not None:
        return sum(map(math.prod, quantised.shapes()))
    try:
        return sum(math.prod(stored.shape) for stored in stored_tensors(folder).values())
    except SourceError:
        return sum(path.stat().st_size for pattern in _WEIGHTS for path in folder.glob(pattern))
