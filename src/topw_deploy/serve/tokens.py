"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import TopWError
from topw_deploy.serve.access import log_entry_of
from topw_deploy.serve.bodies import read_body
from topw_deploy.serve.chat_plan import template_messages, template_variables
from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.schemas.tokens import DetokenizeRequest, TokenizeRequest
from topw_deploy.serve.served import Served, cancel_on_disconnect
from topw_deploy.serve.service import service_of


async def tokenize(request: Request) -> Response:
    """Answer the token ids of a text, or of the rendered messages of a chat."""
    body = await read_body(request, TokenizeRequest)
    served = service_of(request).find(body.model)
    log_entry_of(request).facts["model"] = served.name
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("give one of prompt and messages.", "prompt")

    def encode() -> list[int]:
        if body.messages is None:
            return served.encode(body.prompt or "", body.add_special_tokens)
        variables = template_variables(body.chat_template_kwargs, body.tools or None)
        return served.encode(served.render(template_messages(body.messages), variables), False)

    try:
        ids = await cancel_on_disconnect(request, served.prepare(encode))
    except TopWError as error:
        raise _without_path(error, served) from None
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.model.tokenizer.text_of(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Answer the text of token ids, special tokens included."""
    body = await read_body(request, DetokenizeRequest)
    served = service_of(request).find(body.model)
    log_entry_of(request).facts["model"] = served.name
    size = served.model.manifest.sampler.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise invalid_request(f"tokens has an id that is not from 0 to {size - 1}.", "tokens")
    decode = served.prepare(lambda: served.model.tokenizer.decode(body.tokens, False))
    text = await cancel_on_disconnect(request, decode)
    return JSONResponse({"prompt": text})


def _without_path(error: TopWError, served: Served) -> TopWError:
    """The error with the model's name in place of the folder's path."""
    error.args = (served.without_path(str(error)), *error.args[1:])
    return error
