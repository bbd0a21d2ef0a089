"""Files of a folder, changed in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_json(path: Path, change: Callable[[Any], object] | None = None, **fields: object) -> None:
    """Change an object in JSON by a function, and by fields at its top. A missing file counts as an empty object."""
    data = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if change is not None:
        change(data)
    path.write_text(json.dumps(data | fields), "utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the tensors of a checkpoint in one file."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in change(load_file(file)).items()}, file, {"format": "pt"})
