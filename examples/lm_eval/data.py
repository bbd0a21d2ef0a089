"""The tasks' data: a JSON file beside this one, wherever the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets


def load(file: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The split "test": the objects in `file`. lm_eval passes its other metadata too."""
    found: dict[str, datasets.Dataset] = datasets.load_dataset(
        "json", data_files={"test": str(Path(__file__).with_name(file))}
    )
    return found
