"""/v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StrictStr

from topw_deploy.serve.schemas.common import Generating

Texts = Annotated[list[StrictStr], Field(min_length=1)]
Ids = Annotated[list[StrictInt], Field(min_length=1)]
Batch = Annotated[list[Ids], Field(min_length=1)]


class CompletionRequest(Generating):
    """The body of /v1/completions.

    prompt: a text, token ids, or a list of either.
    echo: whether the answer begins with the prompt and, with `logprobs`, its log-probabilities.
    return_token_ids: whether the answer has its token ids and the prompt's.
    """

    prompt: StrictStr | Texts | Ids | Batch
    echo: StrictBool | None = None
    return_token_ids: StrictBool | None = None
