"""One request's generation, counted in its log entry and in the metrics."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from anyio import CapacityLimiter
from starlette.requests import ClientDisconnect, Request

from topw_deploy.errors import PromptError, TopWError
from topw_deploy.runtime import GenerationResult, Piece
from topw_deploy.runtime.logprobs import Logits
from topw_deploy.serve.access import log_entry_of
from topw_deploy.serve.choices import usage_fields
from topw_deploy.serve.failures import TOO_LONG, RequestError, failure_of, is_expected
from topw_deploy.serve.parameters import name_as_given
from topw_deploy.serve.schemas.generation import GenerationRequest, StreamOptions
from topw_deploy.serve.served import Pieces, await_first_piece, cancel_on_disconnect, check_not_cancelled
from topw_deploy.serve.service import Service

Result = TypeVar("Result")


class Run:
    """The generation that a request asks for, of one or several sequences.

    kind: beginning of the answer's id, such as "chatcmpl".
    prompt_field: name of the field with the prompt, for error messages.
    created: unix time.
    samples: number of sequences per prompt.
    prompt_tokens: number of tokens of all prompts; the endpoint sets it before the generation.
    """

    def __init__(
        self, request: Request, service: Service, body: GenerationRequest, kind: str, prompt_field: str
    ) -> None:
        self.log_entry = log_entry_of(request)
        self.options, self.served = service.options, service.find(body.model)
        self.id, self.created = f"{kind}-{self.log_entry.id}", int(time.time())
        self.prompt_tokens, self.samples = 0, 1
        self.log_entry.facts["model"] = self.served.name
        self._request, self._metrics, self._body = request, service.metrics, body
        self._prompt_field = prompt_field
        self._sequences, self._failed = 0, False
        self._drawn: dict[int, int] = {}
        self._results: dict[int, GenerationResult] = {}
        self._reuses = body.cache_prompt is not False

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    @property
    def returns_ids(self) -> bool:
        """Whether the answer must have token ids."""
        return bool(getattr(self._body, "return_token_ids", None))

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, with the tokens so far."""
        first = [result for row, result in self._results.items() if row % self.samples == 0]
        cached = sum(result.cached_tokens for result in first)
        return usage_fields(self.prompt_tokens, sum(self._drawn.values()), cached)

    def usage_field(self, options: StreamOptions) -> dict[str, Any]:
        """The field `usage` of a chunk: the tokens so far, null before the last chunk, or no field."""
        if options.continuous_usage_stats:
            return {"usage": self.usage}
        return {"usage": None} if options.include_usage else {}

    async def prepare(self, function: Callable[[], Result], limiter: CapacityLimiter | None = None) -> Result:
        """Call a slow function in a thread, as `Served.prepare` does. Raises RequestError for an expected error."""
        with self.naming_fields():
            return await cancel_on_disconnect(self._request, self.served.prepare(function, limiter))

    async def logits(self, tokens: Sequence[int]) -> Logits:
        """The logits float32 [V] after `tokens`. If the client disconnects, the row is freed."""
        with self.naming_fields():
            return await cancel_on_disconnect(self._request, self.served.logits(tokens))

    async def generate(self, prompt: Any, parameters: Mapping[str, Any]) -> list[GenerationResult]:
        """The results of all sequences, in order. If the client disconnects, the rows are freed.

        Raises RequestError for an expected error, such as a server that stops.
        """
        self._count_sequences(prompt, parameters)
        with self.naming_fields(), self._counting_disconnects():
            work = self.served.generate(prompt, parameters, self._body.max_time, self._reuses)
            results = await cancel_on_disconnect(self._request, work)
        for row, result in enumerate(results):
            self._record_end(row, result, streamed=False)
        for result in results:
            check_not_cancelled(result)
        return results

    async def begin_stream(self, prompt: Any, parameters: Mapping[str, Any]) -> Pieces:
        """Start a stream. Raises errors that occur before its first piece and in its first FIRST_PIECE_SECONDS."""
        self._count_sequences(prompt, parameters)
        with self.naming_fields(), self._counting_disconnects():
            return await cancel_on_disconnect(self._request, self._start_stream(prompt, parameters))

    async def close_stream(self, pieces: Pieces) -> None:
        """End a stream. Cancels sequences that have not ended, and counts them as aborted unless the stream failed."""
        await pieces.aclose()
        if not self._failed:
            self._count_aborted()

    async def count_pieces(self, pieces: Pieces) -> AsyncIterator[Piece]:
        """Yield the pieces, counted. Raises RequestError for an expected error, such as a server that stops."""
        last: dict[int, tuple[float, int]] = {}
        with self.naming_fields():
            async for piece in self._pieces_until_failure(pieces):
                now = time.perf_counter()
                before, drawn = last.get(piece.row, (now, piece.drawn))
                if piece.drawn > drawn:
                    self._metrics.add_gap(self.served.name, (now - before) / (piece.drawn - drawn))
                last[piece.row] = now, piece.drawn
                self._drawn[piece.row] = piece.drawn
                if piece.result is not None:
                    self._record_end(piece.row, piece.result, streamed=True)
                    check_not_cancelled(piece.result)
                yield piece

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Turn expected errors into RequestErrors that name the fields as the request does."""
        try:
            yield
        except RequestError:
            raise
        except TopWError as error:
            if not is_expected(error):
                raise
            failure = failure_of(error)
            message, param = self.served.without_path(failure.message), name_as_given(failure.param, self._body.others)
            if param is not None:
                message = re.sub(rf"\b{failure.param}\b", param, message)
            if failure.code == TOO_LONG:  # clients such as litellm recognise OpenAI's words
                message = f"this model's maximum context length is {self.served.length} tokens: {message}"
            if isinstance(error, PromptError):
                param = self._prompt_field
            raise RequestError(replace(failure, message=message, param=param)) from None

    def log_prompt(self, prompt: Any) -> None:
        """Add the prompt to the log entry, if the server logs prompts."""
        if self.options.log_prompts:
            self.log_entry.facts["prompt"] = prompt

    async def _pieces_until_failure(self, pieces: Pieces) -> AsyncIterator[Piece]:
        """The pieces of a request that carry text or a regular end. Raises the request's error if it fails."""
        try:
            async for piece in pieces:
                if piece.result is None or piece.result.finish_reason != "error":
                    yield piece
        except Exception:
            self._failed = True
            raise

    def _count_sequences(self, prompt: Any, parameters: Mapping[str, Any]) -> None:
        samples = parameters.get("num_return_sequences", 1)
        self.samples = samples if type(samples) is int else 1  # the engine refuses others
        several = bool(prompt) and isinstance(prompt[0], list)
        self._sequences = self.samples * (len(prompt) if several else 1)

    @contextmanager
    def _counting_disconnects(self) -> Iterator[None]:
        """Count the sequences as aborted if the client disconnects."""
        try:
            yield
        except ClientDisconnect:
            self._count_aborted()
            raise

    def _count_aborted(self) -> None:
        self._metrics.count_aborted(self.served.name, self._sequences - len(self._results))

    async def _start_stream(self, prompt: Any, parameters: Mapping[str, Any]) -> Pieces:
        return await await_first_piece(await self.served.stream(prompt, parameters, self._body.max_time, self._reuses))

    def _record_end(self, row: int, result: GenerationResult, *, streamed: bool) -> None:
        self._drawn[row], self._results[row] = len(result.token_ids), result
        self._metrics.count_ended(self.served.name, result, streamed=streamed)
        results = [self._results[row] for row in sorted(self._results)]
        facts = self.log_entry.facts
        facts |= {
            "stream": self.is_stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": sum(len(each.token_ids) for each in results),
            "first_token_seconds": round(min(each.timings.prefill_seconds for each in results), 6),
            "finish_reasons": [each.finish_reason for each in results],
        }
        if self.options.log_prompts:
            facts["answers"] = [each.text for each in results]
