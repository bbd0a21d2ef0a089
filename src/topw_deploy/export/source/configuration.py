"""Read a model's configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError
from topw_deploy.folders import read_bounded

MOST_JSON = 16 << 20  # bytes of a configuration file


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if the file is missing. Raises SourceError for any other content."""
    try:
        data = json.loads(read_bounded(path, MOST_JSON, follow=True).decode("utf-8"))
        json.dumps(data, ensure_ascii=False).encode(
            "utf-8"
        )  # raises for a lone surrogate, which no UTF-8 file can hold
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); repair it.") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds a {type(data).__name__}, not an object; repair it.")
    return data


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a composite model's config.json, or the whole of a text model's."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config
