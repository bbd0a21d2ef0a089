"""Generate like `topw generate`, then recompute and analyse every step's logits.

The exported graph has no logits output, so the part of the graph before the sampler runs again on the generated tokens,
with the same cache and padding. Each crop is compared with the size and certificate that the first run reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from topw_deploy.errors import ManifestError, PromptError
from topw_deploy.export.graft.sampler_node import sampler_node
from topw_deploy.export.graph.embedding import find_embedding
from topw_deploy.export.graph.table import EmbeddingTable, stored_array
from topw_deploy.export.tail import GEOMETRY_INPUTS, TAIL_INPUTS
from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.manifest import MODEL_NAME, DecoderManifest
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import counted
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.request import Limits, RowRequest, check_text, resolver
from topw_deploy.runtime.row_inputs import Edits
from topw_deploy.sampling import Geometry, RuleParameters, TopWParameters, apply_edits, as_float32
from topw_deploy.stats.analyse import Analyser, Step
from topw_deploy.stats.exact.analyse import ExactAnalyser, ExactStep, check, spread_steps
from topw_deploy.stats.request import ExactRequest, Prompt, Setting


@dataclass(frozen=True)
class Generated:
    """Request and result of one prompt under one setting."""

    request: RowRequest
    result: GenerationResult


@dataclass(frozen=True)
class Analysed:
    """A generated sequence and its steps.

    agreed: number of steps whose crop has the reported size and certificate.
    exact: the steps analysed under the exact objective, by position from 0.
    """

    generated: Generated
    steps: list[Step]
    agreed: int
    exact: dict[int, ExactStep] = field(default_factory=dict)


@dataclass(frozen=True)
class Collected:
    """Result of `collect`.

    runs: each setting with its sequences: the prompts in order, once for each seed.
    texts: the texts of added and dropped tokens, by id.
    prompts: number of prompts; None if every sequence has its own.
    """

    runs: list[tuple[Setting, list[Analysed]]]
    texts: dict[int, str]
    prompts: int | None = None


def collect(
    folder: Path,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    *,
    batch_size: int = 1,
    generation: Mapping[str, Any] | None = None,
    seeds: int = 1,
    exact: ExactRequest | None = None,
    progress: Progress = SILENT,
) -> Collected:
    """Generate from every prompt under every setting and analyse each step.

    folder: an exported model.
    batch_size: prompts per batch; batching can change the last bits of logits.
    generation: further parameters of `TopWModel.generate`.
    seeds: texts of each prompt, with consecutive seeds from that of `generation`.
    exact: also analyse steps under the exact objective; needs the extra `exact`.

    Raises ManifestError for a folder without a decoder, PromptError for a prompt longer than the context,
    ParameterError for settings or a pool that the exact objective does not allow, and the errors of `TopWModel`.
    """
    n = len(prompts)
    batches = [range(start, min(start + batch_size, n)) for start in range(0, n, batch_size)]
    with TopWModel.from_pretrained(folder) as model:
        ids = [_ids(model, prompt) for prompt in prompts]
        manifest, tokenizer = model.manifest, model.tokenizer
        analyser, asked = analyser_of(folder, manifest), [{**(generation or {}), **s.parameters} for s in settings]
        firsts = [_requests(model, ids[:1], parameters)[0] for parameters in asked]  # refuse wrong ones early
        solver = None if exact is None else _solver(exact, analyser, firsts)
        progress.say(f"Generating from {counted(n, 'prompt')} under {counted(len(settings), 'setting')}")
        written = []
        with progress.bar(n * len(settings) * seeds, "prompts") as advance:
            for parameters in asked:
                written.append(_generate(model, ids, batches, _by_seed(parameters, seeds), advance))
    progress.say("Analysing every step")
    probe = LogitsProbe(folder, manifest.decoder)
    total = sum(len(one.result.token_ids) for run in written for one in run)
    runs = []
    with progress.bar(total, "tokens") as advance:
        for setting, run in zip(settings, written, strict=True):
            chosen = spread_steps([len(one.result.token_ids) for one in run], exact.steps if exact is not None else 0)
            rows: list[Analysed] = []
            for batch in (range(b.start + n * s, b.stop + n * s) for s in range(seeds) for b in batches):
                solved = [_Solved(solver, chosen[i]) for i in batch]
                rows += _analyse(probe, analyser, [run[i] for i in batch], solved, advance)
            runs.append((setting, rows))
    moved = {token for _, run in runs for one in run for step in one.steps for token in (*step.added, *step.dropped)}
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(moved)}
    return Collected(runs, texts, n)


def analyser_of(folder: Path, manifest: DecoderManifest) -> Analyser:
    """An analyser with the sampler node's table, statistics and bound.

    Raises ManifestError if the node has no statistics.
    """
    sampler = manifest.sampler
    if sampler.options.metric == "uniform" or sampler.hidden_size is None:
        return Analyser(sampler.options, Geometry.uniform())
    graph = ir.load(folder / MODEL_NAME).graph
    inputs = sampler_node(graph).inputs[len(TAIL_INPUTS) :]
    statistics, data = inputs[: len(GEOMETRY_INPUTS)], inputs[len(GEOMETRY_INPUTS) :]
    mean, inverse_std, bound = (_stored(value) for value in statistics)
    lookup = replace(find_embedding(graph), data=tuple(data), hidden=sampler.hidden_size)
    table: Any = EmbeddingTable(lookup, sampler.vocab_size)
    geometry = Geometry.from_embeddings(table, sampler.options.metric, (mean, inverse_std))
    return Analyser(sampler.options, geometry, bound if len(bound) else None)


def _stored(value: ir.Value | None) -> NDArray[np.float32]:
    if value is None or value.const_value is None:
        raise ManifestError("the sampler node has no stored statistics; export the model again.")
    return np.array(stored_array(value.const_value))


def _ids(model: TopWModel, prompt: Prompt) -> list[int]:
    """Raises PromptError if the prompt fills the context."""
    most = model.manifest.decoder.context_length
    check_text(prompt.text, model.tokenizer, Limits(most, model.manifest.sampler.vocab_size), prompt.where)
    ids = model.tokenizer.encode(prompt.text)
    if len(ids) >= most:
        raise PromptError(
            f"{prompt.where} has {len(ids)} tokens, but the model's context of {most} must hold it and a new one; "
            "shorten it."
        )
    return ids


def _requests(model: TopWModel, ids: Sequence[list[int]], parameters: Mapping[str, Any]) -> list[RowRequest]:
    limits = Limits(model.manifest.decoder.context_length, model.manifest.sampler.vocab_size)
    return resolver(model.manifest, model.defaults)(ids, parameters, limits=limits)


def _solver(exact: ExactRequest, analyser: Analyser, firsts: Sequence[RowRequest]) -> ExactAnalyser:
    """Raises ParameterError for a pool or settings that the exact objective does not allow."""
    top_m = analyser.options.top_m
    solver = ExactAnalyser(analyser.options, analyser.geometry, top_m if exact.pool is None else exact.pool)
    for request in firsts:
        check(request.top_w)
    return solver


def _by_seed(parameters: Mapping[str, Any], seeds: int) -> list[Mapping[str, Any]]:
    """`parameters` once for each of `seeds` consecutive seeds."""
    if seeds == 1:
        return [parameters]
    return [{**parameters, "seed": parameters.get("seed", 0) + more} for more in range(seeds)]


def _generate(
    model: TopWModel,
    ids: Sequence[list[int]],
    batches: Sequence[range],
    runs: Sequence[Mapping[str, Any]],
    advance: Advance,
) -> list[Generated]:
    """Generate from all prompts, once with each of the parameters `runs`."""
    requests: list[RowRequest] = []
    results: list[GenerationResult] = []
    for parameters in runs:
        requests += _requests(model, ids, parameters)
        for batch in batches:
            results += model.generate([ids[i] for i in batch], **parameters)
            advance(len(batch))
    return [Generated(request, result) for request, result in zip(requests, results, strict=True)]


@dataclass
class _Solved:
    """Analyses a sequence's steps at the positions `chosen` under the exact objective."""

    solver: ExactAnalyser | None
    chosen: set[int]
    steps: dict[int, ExactStep] = field(default_factory=dict)

    def analyse(
        self, position: int, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters
    ) -> None:
        if self.solver is not None and position in self.chosen:
            self.steps[position] = self.solver.analyse(logits, parameters, rule)


def _analyse(
    probe: LogitsProbe,
    analyser: Analyser,
    batch: Sequence[Generated],
    solved: Sequence[_Solved],
    advance: Advance,
) -> Iterator[Analysed]:
    edits = [_Edits(one) for one in batch]
    steps: list[list[Step]] = [[] for _ in batch]
    agreed = [0] * len(batch)
    for position, logits in enumerate(recomputed_logits(probe, batch)):
        for row, one in enumerate(batch):
            if position >= len(one.result.token_ids):
                continue
            edited, parameters = edits[row].apply(logits[row]), as_float32(one.request.top_w)
            step = analyser.analyse(edited, parameters, one.request.rule)
            solved[row].analyse(position, edited, parameters, one.request.rule)
            edits[row].accept(one.result.token_ids[position])
            reported = one.result.kept[position], one.result.certified[position]
            agreed[row] += reported == (step.kept, step.certified)
            steps[row].append(step)
            advance(1)
    exact = [one.steps for one in solved]
    return (Analysed(*parts) for parts in zip(batch, steps, agreed, exact, strict=True))


def recomputed_logits(probe: LogitsProbe, batch: Sequence[Generated]) -> Iterator[NDArray[np.float32]]:
    """Yield the logits [batch, vocab] of every step, before edits. Those of finished rows are arbitrary."""
    lengths = [len(one.result.token_ids) for one in batch]
    width = max(len(one.request.prompt) for one in batch)
    ids, mask = (np.zeros((len(batch), width), np.int64) for _ in range(2))
    for row, one in enumerate(batch):
        start = width - len(one.request.prompt)
        ids[row, start:], mask[row, start:] = one.request.prompt, 1
    probe.start(len(batch))
    for position in range(max(lengths)):
        yield probe.step(ids, mask)
        alive = np.array([[position + 1 < length] for length in lengths])
        tokens = [one.result.token_ids[min(position, n - 1)] if n else 0 for one, n in zip(batch, lengths, strict=True)]
        ids = np.array(tokens, np.int64)[:, None]
        mask = np.concatenate([mask, alive.astype(np.int64)], axis=1)


class _Edits:
    def __init__(self, one: Generated) -> None:
        self._edits = Edits([one.request])

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self._edits.active:
            return logits
        self._edits.prepare(_NoBinding())  # type: ignore[arg-type]  # `prepare` only binds arrays
        return apply_edits(logits, self._edits.ids[0], self._edits.penalty[0], self._edits.bias[0])

    def accept(self, token: int) -> None:
        self._edits.accept([token])


class _NoBinding:
    def bind_array(self, name: str, array: NDArray[Any]) -> None: ...

    def refresh(self, name: str) -> None: ...
