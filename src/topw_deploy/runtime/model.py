"""`TopWModel`: an exported model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from topw_deploy.errors import GenerationError, ParameterError, PromptError, TokenizerError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime import cache, loop
from topw_deploy.runtime.callbacks import end_on_failure, end_streamer
from topw_deploy.runtime.chat import load_chat_template
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.generation_config import read_bos_token_id, read_model_defaults
from topw_deploy.runtime.limits import (
    Limits,
    check_length,
    check_sequence_count,
    check_size,
    check_text_length,
    model_limits,
)
from topw_deploy.runtime.logprobs import LogitsBuffer, check_logits_output, logits_output
from topw_deploy.runtime.open_session import open_session
from topw_deploy.runtime.ort.providers import short_name
from topw_deploy.runtime.prompts import encode_bad_words, read_prompts, split_inputs
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.request import RowRequest, new_resolver, split_parameters
from topw_deploy.runtime.results import GenerationResult, Piece
from topw_deploy.runtime.row_inputs import MASK_INPUT
from topw_deploy.runtime.session_options import SessionKeywords, SessionOptions, takes_session_options
from topw_deploy.runtime.structured.guide import Grammars, Guide
from topw_deploy.runtime.text import IncrementalDecoder
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools import FAMILIES, Parsed, ToolCallParser, detect
from topw_deploy.runtime.tools.parser import marked_text

if TYPE_CHECKING:
    from typing import Unpack  # since Python 3.11

Message = Mapping[str, Any]


class TopWModel:
    """A language model with Top-W sampling inside its ONNX graph. Open one with `from_pretrained`.

    Thread-safe: each generation has its own bindings and cache.

    defaults: the default parameters, from the model's `generation_config.json`.
    provider: onnxruntime's provider name, or "tensorrt" for an engine.
    cpu_nodes: the nodes that onnxruntime left on the CPU; see `CpuNode`.
    sampler: "native", "plugin" or "graph" (docs/guide/native.md).
    why_graph: why `sampler` is "graph".
    """

    def __init__(
        self,
        folder: ModelFolder[DecoderManifest],
        session: Session,
        started: float,
        *,
        max_length: int | None = None,
        max_batch: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        decoder = folder.manifest.decoder
        cache.check_supported(decoder, session.inputs, session.outputs)
        cache.check_layout(decoder, (*folder.manifest.inputs, *folder.manifest.outputs))
        self._limits = model_limits(folder.manifest, session, max_length, max_batch)
        check_size("prefill_chunk", prefill_chunk)
        self.manifest = folder.manifest
        self.path = folder.path
        self.tokenizer = Tokenizer(folder)
        self._grammars = Grammars(self.tokenizer, folder.manifest.sampler.vocab_size)
        self.defaults = read_model_defaults(folder, self.tokenizer)
        self._resolve_rows = new_resolver(folder.manifest, self.defaults)
        self.provider = session.provider
        self.sampler, self.why_graph = session.sampler, session.why_graph
        self._decoder, self._logits_output = decoder, logits_output(folder.manifest)
        self._bos_token_id = read_bos_token_id(folder, self.tokenizer)
        self._template = load_chat_template(folder, self.tokenizer)
        caches = cache.new_caches(
            session, decoder, max_length=max_length, max_batch=max_batch, prefill_chunk=prefill_chunk
        )
        self._caches: cache.Caches | None = caches
        self._takes_ragged_batches = caches.takes_ragged_batches
        self._session: Session | None = session
        self.load_seconds = 0.0
        session.check_with_run(self._run_one_step)
        self.cpu_nodes = session.cpu_nodes
        self.load_seconds = time.perf_counter() - started

    @classmethod
    @takes_session_options
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        max_length: int | None = None,
        max_batch: int | None = None,
        prefill_chunk: int | None = None,
        **session: Unpack[SessionKeywords],
    ) -> TopWModel:
        """Open a folder written by `topw-export`. Reads no other files and runs no code but the graph.

        max_length: maximum tokens per sequence, with the prompt. None: the context length.
        max_batch: maximum sequences per call. If max_length is given too, the cache is allocated at once, otherwise on
            demand.
        prefill_chunk: maximum prompt tokens per run, over all rows; a smaller chunk takes less memory. None: 1,024.
        session: the provider, its options, threads and the sampler; see `SessionOptions`.

        Raises ManifestError, TokenizerError, ProviderError, or ParameterError for an invalid option.
        """
        started = time.perf_counter()
        folder = ModelFolder(path, DecoderManifest)
        opened = open_session(folder, SessionOptions(**session))
        return cls(folder, opened, started, max_length=max_length, max_batch=max_batch, prefill_chunk=prefill_chunk)

    @property
    def cache_bytes(self) -> int:
        """Size of the key-value buffers; 0 if onnxruntime owns the cache ("concat").

        Host pages take memory only once they are written.
        """
        return 0 if self._caches is None else self._caches.bytes

    @overload
    def generate(self, prompt: str, **parameters: Any) -> GenerationResult: ...
    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **parameters: Any
    ) -> list[GenerationResult]: ...
    @overload
    def generate(self, prompt: Sequence[int], **parameters: Any) -> GenerationResult: ...
    @overload
    def generate(self, prompt: Any = None, **parameters: Any) -> Any: ...

    def generate(self, prompt: Any = None, **parameters: Any) -> Any:
        """Continue `prompt`. Returns one GenerationResult, or a list for a batch or `num_return_sequences` > 1.

        prompt: text, token ids, a batch of either, or a tokenizer's output, also as keywords.
        parameters: see docs/guide/runtime.md. A list gives one value per prompt.

        Raises ParameterError, PromptError, GenerationError, and errors of the callbacks.
        """
        pieces, rows, is_single = self._start_generation(prompt, parameters, streaming=False)
        results = {piece.row: piece.result for piece in pieces}
        return results[0] if is_single else [results[row] for row in range(rows)]

    def stream(self, prompt: Any = None, **parameters: Any) -> Iterator[Piece]:
        """Yield the text of `generate` in pieces; a row's last piece has the row's result.

        Raises the errors of a wrong prompt or parameter at once, not at the first piece.
        """
        pieces, _, _ = self._start_generation(prompt, parameters, streaming=True)
        return pieces

    def chat(
        self, messages: Sequence[Message], *, template_variables: Mapping[str, Any] | None = None, **parameters: Any
    ) -> GenerationResult:
        """Answer `messages`, mappings with `role` and `content`. See `apply_chat_template`."""
        return self.generate(self._encode_chat(messages, template_variables, parameters), **parameters)

    def stream_chat(
        self, messages: Sequence[Message], *, template_variables: Mapping[str, Any] | None = None, **parameters: Any
    ) -> Iterator[Piece]:
        """Yield the text of `chat` in pieces, as `stream` does."""
        return self.stream(self._encode_chat(messages, template_variables, parameters), **parameters)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages` with the chat template. Encode the result with add_special_tokens=False.

        variables: for the template, such as `tools`: JSON schemas, or Python functions with type hints and a docstring
            in Google's style.

        Raises TokenizerError if there is no template, PromptError if it rejects the messages, ParameterError for a
        function without a schema.
        """
        if self._template is None:
            raise TokenizerError(
                f"{self.path} has no chat template, so it is not a chat model; use a plain prompt, or put a "
                "chat_template.jinja beside the tokenizer and export again."
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `chat` and `apply_chat_template` need."""
        return self._template is not None

    @cached_property
    def tool_family(self) -> str | None:
        """The family of the chat template's tool calls (docs/guide/tools.md); None if the family is unknown."""
        template = self._template
        source = None if template is None else (template.with_tools or template).source
        return detect(source, self.tokenizer.added_tokens)

    def tool_parser(
        self, tools: Sequence[Any] | None = None, family: str | None = None, prompt: str = ""
    ) -> ToolCallParser:
        """Make a parser for a streamed output. Generate the output with skip_special_tokens=False.

        tools, prompt: see `ToolCallParser`.
        family: None for `tool_family`.

        Raises ParameterError if the family is unknown.
        """
        if family is None and self.tool_family is None:
            raise ParameterError(
                f"the chat template of {self.path} has tool calls of no known family; give family, one of "
                f"{', '.join(FAMILIES)}.",
                "family",
            )
        return ToolCallParser(family or str(self.tool_family), tools, prompt)

    def parse_tool_calls(
        self,
        output: str | GenerationResult,
        tools: Sequence[Any] | None = None,
        family: str | None = None,
        prompt: str = "",
    ) -> Parsed:
        """Split an output into content, reasoning and tool calls. A malformed call stays in the content.

        output: a result, even if its text lacks special tokens; or a text with special tokens.
        tools, family, prompt: see `tool_parser`.
        """
        parser = self.tool_parser(tools, family, prompt)
        text = output if isinstance(output, str) else marked_text(output, self.tokenizer, parser.family)
        return Parsed.of([*parser.feed(text), *parser.finish()])

    def close(self) -> None:
        """Free the session and the cache as soon as running generations end."""
        self._session = self._caches = None

    def __enter__(self) -> TopWModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TopWModel({str(self.path)!r}, {self._decoder.model_type}, {short_name(self.provider)})"

    def _run_one_step(self) -> None:
        (request,), *_ = self._resolve_requests([0], {"max_new_tokens": 1, "seed": 0})
        generation = loop.Generation(*self._require_open(), [loop.Row(0, request, None)])
        try:
            loop.prefill(generation)
        finally:
            generation.close()

    def _encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None, parameters: Mapping[str, Any]
    ) -> list[int]:
        with end_on_failure(parameters.get("streamer")):
            text = self.apply_chat_template(messages, **(variables or {}))
            return self._encode_text(text, False, "the prompt", self._limits)

    def _encode_text(self, text: str, add_special_tokens: bool, which: str, limits: Limits) -> list[int]:
        check_text_length(text, limits, which)
        return self.tokenizer.encode(text, add_special_tokens)

    def _start_generation(
        self, prompt: Any, parameters: Mapping[str, Any], *, streaming: bool
    ) -> tuple[Iterator[Piece], int, bool]:
        """Start a generation. Returns (pieces, number of sequences, whether to return one result instead of a list)."""
        try:
            requests, request_parameters, is_single = self._resolve_requests(prompt, parameters)
            return self._new_pieces(requests, request_parameters, streaming=streaming), len(requests), is_single
        except BaseException:
            end_streamer(parameters.get("streamer"))
            raise

    def _resolve_requests(
        self, prompt: Any, parameters: Mapping[str, Any], limits: Limits | None = None
    ) -> tuple[list[RowRequest], Mapping[str, Any], bool]:
        """Check a call's prompt and parameters.

        limits: None for the model's.

        Returns (rows, values of REQUEST_PARAMETERS, whether to return one result instead of a list).
        """
        limits = limits or self._limits
        prompt, attention_mask, parameters = split_inputs(prompt, parameters)
        row_parameters, request_parameters = split_parameters(parameters)
        samples = request_parameters["num_return_sequences"]
        row_parameters, config = (
            encode_bad_words(given, self.tokenizer)
            for given in (row_parameters, request_parameters["generation_config"])
        )
        prompts, is_single = self._read_prompts(
            prompt, attention_mask, request_parameters["add_special_tokens"], samples, limits
        )
        rows = self._resolve_rows(prompts, row_parameters, limits=limits, samples=samples, config=config)
        if not self._takes_ragged_batches and len({len(p) for p in prompts}) > 1:
            raise PromptError(
                f"this decoder cannot pad, but the prompts of the batch have {', '.join(str(len(p)) for p in prompts)} "
                "tokens; generate from them one by one, or group those of equal length."
            )
        if request_parameters["streamer"] is not None and len(rows) > 1:
            raise ParameterError(
                f"a streamer follows one sequence, but the request has {len(rows)}; generate them one by one, or use "
                "model.stream, whose pieces name their row."
            )
        scored = [row for row in rows if row.needs_scores]
        if scored:
            check_logits_output(scored, self._logits_output, self.path)
        return rows, request_parameters, is_single and samples == 1

    def _read_prompts(
        self, prompt: Any, mask: Any, add_special_tokens: bool, samples: int, limits: Limits
    ) -> tuple[list[list[int]], bool]:
        """Check the prompts' number and lengths, then tokenize. Returns (ids per prompt, whether there is no batch)."""

        def check(tokens: int, which: str) -> None:
            check_length(tokens, limits, which)

        prompts, is_single = read_prompts(prompt, mask, check)
        check_sequence_count(len(prompts) * samples, limits)
        bos = [] if self._bos_token_id is None else [self._bos_token_id]
        names = [f"prompt {index}" for index in range(len(prompts))] if len(prompts) > 1 else ["the prompt"]
        return [
            (self._encode_text(p, add_special_tokens, name, limits) if isinstance(p, str) else p) or bos
            for p, name in zip(prompts, names, strict=True)
        ], is_single

    def _new_guides(self, rows: Sequence[RowRequest]) -> list[Guide | None]:
        """The guide of each row, or [] if no row has a constraint.

        Raises ParameterError if the graph cannot mask tokens, and the errors of `Grammars.guides`.
        """
        if all(row.constraint is None for row in rows):
            return []
        if MASK_INPUT not in self._require_open()[0].inputs:
            raise ParameterError(
                f"structured_outputs needs a graph with the input {MASK_INPUT!r}, which this one lacks; export the "
                "model again.",
                "structured_outputs",
            )
        return self._grammars.guides([(row.constraint, row.eos_token_ids) for row in rows])

    def _new_pieces(
        self, requests: Sequence[RowRequest], request_parameters: Mapping[str, Any], *, streaming: bool
    ) -> Iterator[Piece]:
        def new_text_decoder(prompt: Sequence[int]) -> IncrementalDecoder:
            return self.tokenizer.text_decoder(prompt, request_parameters["skip_special_tokens"])

        return loop.RequestRun(
            *self._require_open(),
            requests,
            new_text_decoder,
            self.load_seconds,
            streaming=streaming,
            streamer=request_parameters["streamer"],
            criteria=request_parameters["stopping_criteria"],
            guides=self._new_guides(requests),
            logits=self._new_logits_buffer(len(requests))
            if any(request.needs_scores for request in requests)
            else None,
            text_of=self.tokenizer.text_of,
        ).pieces()

    def _new_logits_buffer(self, rows: int) -> LogitsBuffer | None:
        """A buffer for the graph's logits, or None if the graph does not return them."""
        spec = self._logits_output
        return None if spec is None else LogitsBuffer(spec, rows, self.manifest.sampler.vocab_size)

    def _require_open(self) -> tuple[Session, cache.Caches]:
        if self._session is None or self._caches is None:
            raise GenerationError("the model is closed; open it again with TopWModel.from_pretrained.")
        return self._session, self._caches
