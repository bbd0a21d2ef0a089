"""What the requests of several endpoints have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from topw_deploy.serve.failures import invalid
from topw_deploy.serve.parameters import read_parameters


class StreamOptions(BaseModel):
    """`stream_options`. Its other fields, such as `include_obfuscation`, are ignored.

    include_usage: whether a last chunk has the usage.
    continuous_usage_stats: whether each chunk has it.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Generating(BaseModel):
    """A request for text.

    model: may be absent if only one model is served.
    cache_prompt: whether the states of an earlier prompt with the same beginning may be reused.
    max_time: seconds, including the wait in the queue; the server's own limit also applies.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    cache_prompt: StrictBool | None = None
    max_time: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def others(self) -> Mapping[str, Any]:
        """The fields that are not declared."""
        return self.model_extra or {}

    def parameters(self) -> dict[str, Any]:
        """The engine's parameters. Raises RequestError for an unknown field, or options of a stream without one."""
        if self.stream_options is not None and not self.stream:
            raise invalid('stream_options is given without stream; add "stream": true.', "stream_options")
        return read_parameters(self.others)
