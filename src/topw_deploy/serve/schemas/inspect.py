"""The request of /topw/inspect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, StrictInt

from topw_deploy.serve.schemas.generation import GenerationRequest

_ONLY_FOR_TEXT = "belongs to a request for text; remove it"
_GRAMMAR = "cannot be inspected, because a grammar's mask is not recomputed; inspect an answer without it"
Ids = list[Annotated[int, Field(strict=True, ge=0)]]


class InspectRequest(GenerationRequest):
    """The body of /topw/inspect: the fields of a request that was answered, and the token of its answer to explain.

    prompt_token_ids: token ids of the prompt, at least one.
    token_ids: token ids of the answer, at least up to the token to explain.
    position: index of the token to explain in `token_ids`, from 0.
    sample: index of the answer among the `n` answers to the request.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("stream", "stream_options", "max_time", "cache_prompt"), _ONLY_FOR_TEXT),
        **dict.fromkeys(("structured_outputs", "response_format"), _GRAMMAR),
    }

    prompt_token_ids: Ids = Field(min_length=1)
    token_ids: Ids = Field(min_length=1)
    position: StrictInt = Field(ge=0)
    sample: StrictInt = Field(default=0, ge=0)
