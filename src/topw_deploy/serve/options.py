"""The server's options, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import FAMILIES


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Checked options of the server.

    models: name of a model in requests -> its exported folder.
    opening: options of `TopWModel.from_pretrained`.
    engine: options of each model's `Engine`.
    api_keys: accepted keys; empty for a server without keys.
    cors_origins: origins whose pages may call the server; "*" for all.
    max_body: maximum number of bytes of a request's body.
    header_timeout: seconds in which a request's head must arrive; applies to `topw serve`, not to other ASGI servers.
    body_timeout: seconds in which a body must arrive.
    max_prompt_tokens: maximum number of tokens of a prompt; None for what the model's context holds.
    request_timeout: maximum seconds of a generation, including the wait in the queue; None for no limit.
    ping_interval: seconds between the comments of a stream, which keep its connection open.
    send_timeout: seconds after which the connection of a client that reads nothing is closed.
    drain_timeout: seconds in which running requests may finish after a signal to stop.
    log_prompts: whether the log contains prompts and answers.
    tool_parser: family of the models' tool calls; None for the family that the chat template shows.
    page: whether to serve the page at `/` and its endpoint `/topw/inspect`.

    Raises ParameterError for an invalid value.
    """

    models: Mapping[str, Path]
    opening: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 * 2**20
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    max_prompt_tokens: int | None = None
    request_timeout: float | None = 600.0
    ping_interval: float = 15.0
    send_timeout: float = 60.0
    drain_timeout: float = 30.0
    log_prompts: bool = False
    tool_parser: str | None = None
    page: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise ParameterError("there is no model to serve; give at least one exported folder.", "models")
        for name in self.models:
            _check_text("the name of a model", name)
        for key in self.api_keys:
            _check_text("api_key", key)
        for name in ("max_body", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(f"{name} is {value!r}, but must be an integer >= 1.", name)
        for each in fields(self):
            if each.name.endswith(("_timeout", "_interval")):
                _check_seconds(each.name, getattr(self, each.name))
        if self.tool_parser is not None and self.tool_parser not in FAMILIES:
            raise ParameterError(
                f"tool_parser is {self.tool_parser!r}, but must be one of {', '.join(FAMILIES)}.", "tool_parser"
            )


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str) or not value or not value.isprintable() or value.strip() != value:
        raise ParameterError(f"{what} is {value!r}, but must be printable text without spaces around it.")


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ParameterError(f"{name} is {value!r}, but must be a finite number of seconds > 0.", name)
