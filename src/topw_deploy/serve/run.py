"""One request's generation, and its log line and metrics."""

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
from topw_deploy.serve.access import record_of
from topw_deploy.serve.choices import usage_of
from topw_deploy.serve.failures import TOO_LONG, RequestError, expected, failure_of
from topw_deploy.serve.parameters import named_as_given
from topw_deploy.serve.schemas.generation import Generating, StreamOptions
from topw_deploy.serve.served import Pieces, begun, check_whole, unless_gone
from topw_deploy.serve.service import Service

Result = TypeVar("Result")


class Run:
    """A request's generation, of one or several sequences.

    kind: beginning of its id, such as "chatcmpl".
    prompt_field: the field that holds the prompt, for errors.
    samples: sequences per prompt.
    prompt_tokens: of all prompts; set before the run.
    """

    def __init__(self, request: Request, service: Service, body: Generating, kind: str, prompt_field: str) -> None:
        self.record = record_of(request)
        self.options, self.served = service.options, service.find(body.model)
        self.id, self.created = f"{kind}-{self.record.id}", int(time.time())
        self.prompt_tokens, self.samples = 0, 1
        self.record.facts["model"] = self.served.name
        self._request, self._metrics, self._body = request, service.metrics, body
        self._prompt_field = prompt_field
        self._sequences, self._failed = 0, False
        self._drawn: dict[int, int] = {}
        self._results: dict[int, GenerationResult] = {}
        self._reuses = body.cache_prompt is not False

    @property
    def streams(self) -> bool:
        return bool(self._body.stream)

    @property
    def returns_ids(self) -> bool:
        """Whether the answer has token ids."""
        return bool(getattr(self._body, "return_token_ids", None))

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far, as OpenAI's `usage`."""
        first = [result for row, result in self._results.items() if row % self.samples == 0]
        cached = sum(result.cached_tokens for result in first)
        return usage_of(self.prompt_tokens, sum(self._drawn.values()), cached)

    def usage_field(self, options: StreamOptions) -> dict[str, Any]:
        """`usage` of a chunk: the counts so far, null before the last chunk, or absent."""
        if options.continuous_usage_stats:
            return {"usage": self.usage}
        return {"usage": None} if options.include_usage else {}

    async def prepare(self, function: Callable[[], Result], limiter: CapacityLimiter | None = None) -> Result:
        """Call a slow function in a thread; see `Served.prepare`."""
        with self.naming():
            return await unless_gone(self._request, self.served.prepare(function, limiter))

    async def logits(self, tokens: Sequence[int]) -> Logits:
        """The logits after `tokens`; see `Served.logits`. A client that goes away frees the row."""
        with self.naming():
            return await unless_gone(self._request, self.served.logits(tokens))

    async def whole(self, prompt: Any, parameters: Mapping[str, Any]) -> list[GenerationResult]:
        """All results, in order. If the client disconnects, the rows are freed. Raises RequestError as `watch` does."""
        self._count(prompt, parameters)
        with self.naming(), self._leaving():
            work = self.served.generate(prompt, parameters, self._body.max_time, self._reuses)
            results = await unless_gone(self._request, work)
        for row, result in enumerate(results):
            self._end(row, result, streamed=False)
        for result in results:
            check_whole(result)
        return results

    async def begin(self, prompt: Any, parameters: Mapping[str, Any]) -> Pieces:
        """Start a stream. Raises errors that occur before its first piece, or in its first second."""
        self._count(prompt, parameters)
        with self.naming(), self._leaving():
            return await unless_gone(self._request, self._begun(prompt, parameters))

    async def close(self, pieces: Pieces) -> None:
        """End a stream. What has not ended is cancelled, and counts as aborted."""
        await pieces.aclose()
        if not self._failed:
            self._abort()

    async def watch(self, pieces: Pieces) -> AsyncIterator[Piece]:
        """The pieces, counted. Raises RequestError if the server stops."""
        last: dict[int, tuple[float, int]] = {}
        with self.naming():
            async for piece in self._whole_pieces(pieces):
                now = time.perf_counter()
                before, drawn = last.get(piece.row, (now, piece.drawn))
                if piece.drawn > drawn:
                    self._metrics.gap(self.served.name, (now - before) / (piece.drawn - drawn))
                last[piece.row] = now, piece.drawn
                self._drawn[piece.row] = piece.drawn
                if piece.result is not None:
                    self._end(piece.row, piece.result, streamed=True)
                    check_whole(piece.result)
                yield piece

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Make errors name the fields of the request."""
        try:
            yield
        except RequestError:
            raise
        except TopWError as error:
            if not expected(error):
                raise
            failure = failure_of(error)
            message, param = self.served.plain(failure.message), named_as_given(failure.param, self._body.others)
            if param is not None:
                message = re.sub(rf"\b{failure.param}\b", param, message)
            if failure.code == TOO_LONG:  # OpenAI's words, by which clients such as litellm know it
                message = f"this model's maximum context length is {self.served.length} tokens: {message}"
            if isinstance(error, PromptError):
                param = self._prompt_field
            raise RequestError(replace(failure, message=message, param=param)) from None

    def log_prompt(self, prompt: Any) -> None:
        if self.options.log_prompts:
            self.record.facts["prompt"] = prompt

    async def _whole_pieces(self, pieces: Pieces) -> AsyncIterator[Piece]:
        """The pieces of a request. Raises its error if it fails, and omits the results that report the failure."""
        try:
            async for piece in pieces:
                if piece.result is None or piece.result.finish_reason != "error":
                    yield piece
        except Exception:
            self._failed = True
            raise

    def _count(self, prompt: Any, parameters: Mapping[str, Any]) -> None:
        samples = parameters.get("num_return_sequences", 1)
        self.samples = samples if type(samples) is int else 1  # the engine refuses others
        several = bool(prompt) and isinstance(prompt[0], list)
        self._sequences = self.samples * (len(prompt) if several else 1)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Count the sequences of a client that disconnects."""
        try:
            yield
        except ClientDisconnect:
            self._abort()
            raise

    def _abort(self) -> None:
        self._metrics.aborted(self.served.name, self._sequences - len(self._results))

    async def _begun(self, prompt: Any, parameters: Mapping[str, Any]) -> Pieces:
        return await begun(await self.served.stream(prompt, parameters, self._body.max_time, self._reuses))

    def _end(self, row: int, result: GenerationResult, *, streamed: bool) -> None:
        self._drawn[row], self._results[row] = len(result.token_ids), result
        self._metrics.ended(self.served.name, result, streamed=streamed)
        results = [self._results[row] for row in sorted(self._results)]
        facts = self.record.facts
        facts |= {
            "stream": self.streams,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": sum(len(each.token_ids) for each in results),
            "first_token_seconds": round(min(each.timings.prefill_seconds for each in results), 6),
            "finish_reasons": [each.finish_reason for each in results],
        }
        if self.options.log_prompts:
            facts["answers"] = [each.text for each in results]
