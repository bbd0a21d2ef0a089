"""Read a model's configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError
from topw_deploy.files import read_bounded

_MOST_JSON = 16 << 20  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} if there is no such file. Raises SourceError for anything else."""
    try:
        data = json.loads(read_bounded(path, _MOST_JSON, follow=True).decode("utf-8"))
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # lone surrogates cannot be exported
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); repair it.") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds a {type(data).__name__}, not an object; repair it.")
    return data


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a composite config.json; all of a plain one."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config
