"""The requests of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from topw_deploy.serve.schemas.generation import Message


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a text, or the messages of a chat.

    add_special_tokens: whether the tokenizer adds its special tokens to a text; a rendered chat has its own.
    return_token_strs: whether the answer has the text of each token.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    tokens: list[StrictInt]
