"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import TopWError
from topw_deploy.serve.access import record_of
from topw_deploy.serve.chat_plan import messages_of, template_variables
from topw_deploy.serve.failures import invalid
from topw_deploy.serve.requests import read, service_of
from topw_deploy.serve.schemas.tokens import DetokenizeRequest, TokenizeRequest
from topw_deploy.serve.served import Served, unless_gone


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of the rendered messages of a chat."""
    body = await read(request, TokenizeRequest)
    served = service_of(request).find(body.model)
    record_of(request).facts["model"] = served.name
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give one of prompt and messages.", "prompt")

    def ids() -> list[int]:
        if body.messages is None:
            return served.encode(body.prompt or "", body.add_special_tokens)
        variables = template_variables(body.chat_template_kwargs, body.tools or None)
        return served.encode(served.render(messages_of(body.messages), variables), False)

    try:
        found = await unless_gone(request, served.prepare(ids))
    except TopWError as error:
        raise _named(error, served) from None
    answer: dict[str, Any] = {"count": len(found), "max_model_len": served.length, "tokens": found}
    if body.return_token_strs:
        answer["token_strs"] = [served.model.tokenizer.text_of(token) for token in found]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = await read(request, DetokenizeRequest)
    served = service_of(request).find(body.model)
    record_of(request).facts["model"] = served.name
    size = served.model.manifest.sampler.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise invalid(f"tokens has an id that is not from 0 to {size - 1}.", "tokens")
    text = await unless_gone(request, served.prepare(lambda: served.model.tokenizer.decode(body.tokens, False)))
    return JSONResponse({"prompt": text})


def _named(error: TopWError, served: Served) -> TopWError:
    """The error without the folder's path."""
    error.args = (served.plain(str(error)), *error.args[1:])
    return error
