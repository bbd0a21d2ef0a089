"""`TopWModel`: an exported model."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as ListOf
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

from topw_deploy.errors import GenerationError, ParameterError, TokenizerError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime import cache
from topw_deploy.runtime.chat import load_chat_template
from topw_deploy.runtime.draft_model import DraftModel, check_draft_model
from topw_deploy.runtime.guide import Grammars
from topw_deploy.runtime.loop import Batch, LogitsBuffer, accept_tokens, logits_output, steps
from topw_deploy.runtime.ort.graph_session import open_session
from topw_deploy.runtime.ort.providers import short_name
from topw_deploy.runtime.parameters import GenerationParameters
from topw_deploy.runtime.prepare import Limits, Preparer, Sequences, check_size, model_limits
from topw_deploy.runtime.results import GenerationResult, Piece
from topw_deploy.runtime.sequence import Sequence, end_on_failure
from topw_deploy.runtime.session import Session, SessionKeywords, SessionOptions, takes_session_options
from topw_deploy.runtime.speculate import RunCosts, draws_several
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools import FAMILIES, Parsed, ToolCallParser, detect
from topw_deploy.runtime.tools.formats import THINK
from topw_deploy.runtime.tools.parser import marked_text

Message = Mapping[str, Any]


class TopWModel:
    """A language model with Top-W sampling inside its ONNX graph. Open one with `from_pretrained`.

    Thread-safe: each generation has its own bindings and cache.

    defaults: the default parameters, from the model's `generation_config.json`.
    provider: onnxruntime's provider name, or "tensorrt" for an engine.
    cpu_nodes: the nodes that onnxruntime left on the CPU; see `CpuNode`.
    sampler: "native", "plugin" or "graph" (docs/guide/native.md).
    why_graph: why `sampler` is "graph".
    draft_model: the smaller model that drafts tokens, or None.
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
        draft_model: DraftModel | None = None,
    ) -> None:
        decoder = folder.manifest.decoder
        cache.check_cache(decoder, (*folder.manifest.inputs, *folder.manifest.outputs))
        limits = model_limits(folder.manifest, session, max_length, max_batch)
        max_length, max_batch = limits.max_length, max_batch and limits.sequences
        prefill_chunk = check_size("prefill_chunk", prefill_chunk)
        self.manifest = folder.manifest
        self.path = folder.path
        self.tokenizer = Tokenizer(folder)
        self._grammars = Grammars(self.tokenizer, folder.manifest.sampler.vocab_size)
        self.provider = session.provider
        self.sampler, self.why_graph = session.sampler, session.why_graph
        self._decoder, self._logits_output = decoder, logits_output(folder.manifest)
        self._template = load_chat_template(folder, self.tokenizer)
        caches = cache.Caches(session, decoder, max_length=max_length, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self._caches: cache.Caches | None = caches
        self.draft_model, has_drafts = draft_model, draft_model is not None
        self._preparer = Preparer(
            folder, self.tokenizer, limits, pads=caches.takes_ragged_batches, has_drafts=has_drafts
        )
        self.defaults = self._preparer.defaults
        self._session: Session | None = session
        self.cpu_nodes = session.cpu_nodes
        self._costs = RunCosts() if draws_several(folder.manifest) else None
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
        draft_model: str | Path | None = None,
        **session: Unpack[SessionKeywords],
    ) -> TopWModel:
        """Open a folder written by `topw-export`. Reads no other files and runs no code but the graph.

        max_length: maximum tokens per sequence, with the prompt. None: the context length.
        max_batch: maximum sequences per call. If max_length is given too, the cache is allocated at once, otherwise on
            demand.
        prefill_chunk: maximum prompt tokens per run, over all rows; a smaller chunk takes less memory. None: 1,024.
        draft_model: folder of a smaller model with the same tokenizer, which drafts tokens (docs/guide/runtime.md,
            Speculation). It is opened with the same session options.
        session: the provider, its options, threads and the sampler; see `SessionOptions`.

        Raises ManifestError, TokenizerError, ProviderError, or ParameterError for an invalid option.
        """
        started = time.perf_counter()
        folder, options, drafts = ModelFolder(path, DecoderManifest), SessionOptions(**session), None
        if draft_model is not None:
            draft = ModelFolder(draft_model, DecoderManifest)
            check_draft_model(draft, folder)
            drafts = DraftModel(open_session(draft, options), draft.manifest, folder.manifest.sampler.vocab_size)
        opened = open_session(folder, options)
        return cls(
            folder,
            opened,
            started,
            max_length=max_length,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            draft_model=drafts,
        )

    @property
    def limits(self) -> Limits:
        """The limits on the prompts and sequences of a call."""
        return self._preparer.limits

    @property
    def cache_bytes(self) -> int:
        """Size of the key-value buffers; 0 if onnxruntime owns the cache ("concat").

        Host pages take memory only once they are written.
        """
        return 0 if self._caches is None else self._caches.bytes

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: str, **parameters: Unpack[GenerationParameters]
    ) -> GenerationResult: ...
    @overload
    def generate(
        self, prompt: ListOf[str] | ListOf[ListOf[int]], **parameters: Unpack[GenerationParameters]
    ) -> list[GenerationResult]: ...
    @overload
    def generate(self, prompt: ListOf[int], **parameters: Unpack[GenerationParameters]) -> GenerationResult: ...
    @overload
    def generate(self, prompt: Any = None, **parameters: Unpack[GenerationParameters]) -> Any: ...

    def generate(self, prompt: Any = None, **parameters: Unpack[GenerationParameters]) -> Any:
        """Continue `prompt`. Returns one GenerationResult, or a list for a batch or `num_return_sequences` > 1.

        prompt: text, token ids, a batch of either, or a tokenizer's output, also as keywords.
        parameters: see `GenerationParameters` and docs/guide/runtime.md. A list gives one value per prompt.

        Raises ParameterError, PromptError, GenerationError, and errors of the callbacks.
        """
        sequences = self._start(prompt, parameters)
        results = {piece.row: piece.result for piece in self._pieces(sequences)}
        return results[0] if sequences.is_single else [results[index] for index in range(len(sequences))]

    def stream(self, prompt: Any = None, **parameters: Unpack[GenerationParameters]) -> Iterator[Piece]:
        """Yield the text of `generate` in pieces; a row's last piece has the row's result.

        Raises the errors of a wrong prompt or parameter at once, not at the first piece.
        """
        sequences = self._start(prompt, parameters)
        for sequence in sequences:
            sequence.decode_as_drawn()
        return self._pieces(sequences, streaming=True)

    def prepare(
        self,
        prompt: Any = None,
        *,
        limits: Limits | None = None,
        shown_tokens: Collection[int] = (),
        **parameters: Unpack[GenerationParameters],
    ) -> Sequences:
        """Check a call's prompt and parameters, and make its sequences, by prompt.

        prompt, parameters: see `generate`.
        limits: None for the model's.
        shown_tokens: special tokens that give text although `skip_special_tokens` omits the others.

        Raises ParameterError and PromptError.
        """
        return self._preparer.prepare(prompt, parameters, limits, shown_tokens)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, which: str = "the prompt", limits: Limits | None = None
    ) -> list[int]:
        """The token ids of a prompt. Raises PromptError for a text that is too long to be tokenized.

        which: the prompt's name in messages.
        limits: None for the model's.
        """
        return self._preparer.encode(text, add_special_tokens, which, limits or self.limits)

    def compile_grammars(self, sequences: Sequences) -> None:
        """Let each sequence with a constraint follow its grammar, which may take seconds. Call this before their steps.

        Raises the errors of `Grammars.guide`.
        """
        for sequence in sequences:
            if sequence.params.constraint is not None:
                sequence.follow(self._grammars.guide(sequence.params.constraint, sequence.params.eos_token_ids))

    def chat(
        self,
        messages: ListOf[Message],
        *,
        template_variables: Mapping[str, Any] | None = None,
        **parameters: Unpack[GenerationParameters],
    ) -> GenerationResult:
        """Answer `messages`, mappings with `role` and `content`. See `apply_chat_template`."""
        return self.generate(self._encode_chat(messages, template_variables, parameters), **parameters)

    def stream_chat(
        self,
        messages: ListOf[Message],
        *,
        template_variables: Mapping[str, Any] | None = None,
        **parameters: Unpack[GenerationParameters],
    ) -> Iterator[Piece]:
        """Yield the text of `chat` in pieces, as `stream` does."""
        return self.stream(self._encode_chat(messages, template_variables, parameters), **parameters)

    def apply_chat_template(
        self, messages: ListOf[Message], *, add_generation_prompt: bool = True, **variables: Any
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

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows reasoning between `<think>` and `</think>`."""
        return self._template is not None and THINK[1] in self._template.source

    def tool_parser(
        self, tools: ListOf[Any] | None = None, family: str | None = None, prompt: str = ""
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
        tools: ListOf[Any] | None = None,
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
        self._session = self._caches = self.draft_model = None

    def __enter__(self) -> TopWModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TopWModel({str(self.path)!r}, {self._decoder.model_type}, {short_name(self.provider)})"

    def _encode_chat(
        self, messages: ListOf[Message], variables: Mapping[str, Any] | None, parameters: Mapping[str, Any]
    ) -> list[int]:
        with end_on_failure(parameters.get("streamer")):
            text = self.apply_chat_template(messages, **(variables or {}))
            return self.encode(text, add_special_tokens=False)

    def _start(self, prompt: Any, parameters: Mapping[str, Any]) -> Sequences:
        """The sequences of a call, ready for `_pieces`."""
        with end_on_failure(parameters.get("streamer")):
            sequences = self.prepare(prompt, **parameters)  # type: ignore[arg-type]
            self._require_open()
            self.compile_grammars(sequences)
            return sequences

    def _pieces(self, sequences: Sequences, *, streaming: bool = False) -> Iterator[Piece]:
        """Yield pieces of new text; a sequence's last piece has its result.

        streaming: whether the pieces have log-probabilities.
        """
        started = time.perf_counter()
        try:
            logits = None
            if self._logits_output is not None and any(sequence.params.needs_scores for sequence in sequences):
                logits = LogitsBuffer(self._logits_output, len(sequences), self.manifest.sampler.vocab_size)
            batch = Batch(*self._require_open(), sequences, logits, self._costs, self.draft_model)
            try:
                for sequence in sequences:
                    if sequence.callbacks is not None:
                        sequence.callbacks.stream_prompt()
                    if sequence.finish_reason is not None:  # no token may be drawn
                        yield self._new_piece(batch, sequence, "", started, streaming)
                for tokens in steps(batch):
                    for sequence, text in accept_tokens(batch, tokens):
                        yield self._new_piece(batch, sequence, text, started, streaming)
            finally:
                batch.close()
        finally:  # a thread may be waiting for the streamer
            if sequences.streamer is not None:
                sequences.streamer.end()

    def _new_piece(self, batch: Batch, sequence: Sequence, text: str, started: float, streaming: bool) -> Piece:
        result = None
        if sequence.finish_reason is not None:
            result = sequence.result(
                partial(batch.outputs, sequence),
                batch.session,
                load_seconds=self.load_seconds,
                started=started,
                prefilled=batch.prefilled_at or started,  # no prefill if a prompt fills the context
            )
        drawn = sequence.steps
        entries = sequence.scores.take_new_entries(drawn) if streaming and sequence.scores is not None else None
        return Piece(text, sequence.index, result, entries, drawn, sequence.take_new_tokens(drawn))

    def _require_open(self) -> tuple[Session, cache.Caches]:
        if self._session is None or self._caches is None:
            raise GenerationError("the model is closed; open it again with TopWModel.from_pretrained.")
        return self._session, self._caches
