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
from topw_deploy.export.embedding import EmbeddingTable, find_embedding, stored_array
from topw_deploy.export.sampler.attach import sampler_node
from topw_deploy.export.sampler.spec import GEOMETRY_INPUTS, SAMPLER_INPUTS
from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.manifest import MODEL_NAME, DecoderManifest
from topw_deploy.plain_text import count_text
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.runtime.sequence import Sequence as Prepared
from topw_deploy.sampling import Geometry, RuleParameters, TopWParameters, as_float32
from topw_lab.stats.analyse import Analyser, StepAnalysis
from topw_lab.stats.exact.analyse import ExactAnalyser, ExactStep, evenly_spaced_steps, require_objective
from topw_lab.stats.request import ExactRequest, Setting, TextPrompt


@dataclass(frozen=True)
class GeneratedSequence:
    """Request and result of one prompt under one setting."""

    request: Prepared
    result: GenerationResult


@dataclass(frozen=True)
class AnalysedSequence:
    """A generated sequence and the analysis of its steps.

    agreed: number of steps whose crop has the size and certificate that the graph reported.
    exact: the steps analysed under the exact objective, by position from 0.
    """

    generated: GeneratedSequence
    steps: list[StepAnalysis]
    agreed: int
    exact: dict[int, ExactStep] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectedRuns:
    """Result of `collect`.

    runs: each setting with its sequences: all prompts in order with the first seed, then with the next seed, and so on.
    texts: the text of each token that distances added or dropped, by token id.
    prompts: number of prompts; None if every sequence has its own.
    """

    runs: list[tuple[Setting, list[AnalysedSequence]]]
    texts: dict[int, str]
    prompts: int | None = None


def collect(
    folder: Path,
    prompts: Sequence[TextPrompt],
    settings: Sequence[Setting],
    *,
    batch_size: int = 1,
    generation: Mapping[str, Any] | None = None,
    seeds: int = 1,
    exact: ExactRequest | None = None,
    progress: Progress = SILENT,
) -> CollectedRuns:
    """Generate from every prompt under every setting and analyse each step.

    folder: an exported model.
    batch_size: prompts per batch; batching can change the last bits of logits.
    generation: further parameters of `TopWModel.generate`.
    seeds: number of texts per prompt; their seeds are consecutive and start with the seed in `generation`.
    exact: also analyse steps under the exact objective; needs the extra `exact`.

    Raises ManifestError for a folder without a decoder, PromptError for a prompt longer than the context,
    ParameterError for settings or a pool that the exact objective does not allow, and the errors of `TopWModel`.
    """
    n = len(prompts)
    batches = [range(start, min(start + batch_size, n)) for start in range(0, n, batch_size)]
    with TopWModel.from_pretrained(folder) as model:
        manifest, tokenizer = model.manifest, model.tokenizer
        ids = [_prompt_ids(model, prompt) for prompt in prompts]
        analyser = load_analyser(folder, manifest)
        # For each setting, the parameters of every seed.
        parameters = [_parameters_by_seed({**(generation or {}), **s.parameters}, seeds) for s in settings]
        # Resolve one prompt with all of them first: wrong parameters are refused before anything is generated.
        requests = [model.prepare(ids[:1], **each)[0] for by_seed in parameters for each in by_seed]
        exact_analyser = None if exact is None else _exact_analyser(exact, analyser, requests)
        progress.say(f"Generating from {count_text(n, 'prompt')} under {count_text(len(settings), 'setting')}")
        with progress.bar(n * len(settings) * seeds, "prompts") as advance:
            generated = [_generate_run(model, ids, batches, by_seed, advance) for by_seed in parameters]
    progress.say("Analysing every step")
    probe = LogitsProbe(folder, manifest.decoder)
    runs = []
    with progress.bar(sum(len(one.result.token_ids) for run in generated for one in run), "tokens") as advance:
        for setting, run in zip(settings, generated, strict=True):
            lengths = [len(one.result.token_ids) for one in run]
            positions = evenly_spaced_steps(lengths, 0 if exact is None else exact.steps)
            exact_steps = [_ExactSteps(exact_analyser, chosen) for chosen in positions]
            sequences: list[AnalysedSequence] = []
            for batch in (range(b.start + n * s, b.stop + n * s) for s in range(seeds) for b in batches):
                rows = [run[i] for i in batch]
                sequences += _analyse_batch(probe, analyser, rows, [exact_steps[i] for i in batch], advance)
            runs.append((setting, sequences))
    return CollectedRuns(runs, _moved_token_texts(runs, tokenizer), n)


def _moved_token_texts(runs: Sequence[tuple[Setting, Sequence[AnalysedSequence]]], tokenizer: Any) -> dict[int, str]:
    steps = [step for _, sequences in runs for sequence in sequences for step in sequence.steps]
    moved = {token for step in steps for token in (*step.added, *step.dropped)}
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(moved)}


def load_analyser(folder: Path, manifest: DecoderManifest) -> Analyser:
    """Load the embedding table and statistics of the sampler node in `folder`.

    Raises ManifestError if the node has no statistics.
    """
    sampler = manifest.sampler
    if sampler.options.metric == "uniform" or sampler.hidden_size is None:
        return Analyser(sampler.options, Geometry.uniform())
    graph = ir.load(folder / MODEL_NAME).graph
    inputs = sampler_node(graph).inputs[len(SAMPLER_INPUTS) :]
    statistics, table_inputs = inputs[: len(GEOMETRY_INPUTS)], inputs[len(GEOMETRY_INPUTS) :]
    mean, inverse_std = (_statistic_array(value) for value in statistics[:2])
    lookup = replace(find_embedding(graph), data=tuple(table_inputs), hidden=sampler.hidden_size)
    table: Any = EmbeddingTable(lookup, sampler.vocab_size)
    geometry = Geometry.from_embeddings(table, sampler.options.metric, (mean, inverse_std))
    return Analyser(sampler.options, geometry)


def _statistic_array(value: ir.Value | None) -> NDArray[np.float32]:
    if value is None or value.const_value is None:
        raise ManifestError("the sampler node has no stored statistics; export the model again.")
    return np.array(stored_array(value.const_value))


def _prompt_ids(model: TopWModel, prompt: TextPrompt) -> list[int]:
    """Raises PromptError, naming the prompt, if it is not valid Unicode or fills the context."""
    context = model.manifest.decoder.context_length
    try:
        ids = model.encode(prompt.text)
    except PromptError as error:
        raise PromptError(f"{prompt.where}: {error}") from None
    if len(ids) >= context:
        raise PromptError(
            f"{prompt.where} has {len(ids)} tokens, but the model's context of {context} must hold it and a new one; "
            "shorten it."
        )
    return ids


def _exact_analyser(exact: ExactRequest, analyser: Analyser, requests: Sequence[Prepared]) -> ExactAnalyser:
    """Raises ParameterError for a pool or requests that the exact objective does not allow."""
    top_m = analyser.options.top_m
    exact_analyser = ExactAnalyser(analyser.options, analyser.geometry, top_m if exact.pool is None else exact.pool)
    for request in requests:
        require_objective(request.params.top_w)
    return exact_analyser


def _parameters_by_seed(parameters: Mapping[str, Any], seeds: int) -> list[Mapping[str, Any]]:
    """`parameters` with each of `seeds` consecutive seeds."""
    if seeds == 1:
        return [parameters]
    return [{**parameters, "seed": parameters.get("seed", 0) + offset} for offset in range(seeds)]


def _generate_run(
    model: TopWModel,
    ids: Sequence[list[int]],
    batches: Sequence[range],
    parameters_by_seed: Sequence[Mapping[str, Any]],
    advance: Advance,
) -> list[GeneratedSequence]:
    """Generate from all prompts once per seed."""
    requests: list[Prepared] = []
    results: list[GenerationResult] = []
    for parameters in parameters_by_seed:
        requests += model.prepare(ids, **parameters)
        for batch in batches:
            results += model.generate([ids[i] for i in batch], **parameters)
            advance(len(batch))
    return [GeneratedSequence(request, result) for request, result in zip(requests, results, strict=True)]


@dataclass
class _ExactSteps:
    """Analyses the steps of one sequence at the positions `chosen` under the exact objective."""

    analyser: ExactAnalyser | None
    chosen: set[int]
    steps: dict[int, ExactStep] = field(default_factory=dict)

    def analyse(
        self, position: int, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters
    ) -> None:
        if self.analyser is not None and position in self.chosen:
            self.steps[position] = self.analyser.analyse(logits, parameters, rule)


def _analyse_batch(
    probe: LogitsProbe,
    analyser: Analyser,
    batch: Sequence[GeneratedSequence],
    exact_steps: Sequence[_ExactSteps],
    advance: Advance,
) -> Iterator[AnalysedSequence]:
    edits = EditInputs(len(batch))
    for row, sequence in enumerate(batch):
        edits.set(row, sequence.request)
    steps: list[list[StepAnalysis]] = [[] for _ in batch]
    agreed = [0] * len(batch)
    for position, logits in enumerate(recomputed_logits(probe, batch)):
        for row, sequence in enumerate(batch):
            request, result = sequence.request, sequence.result
            if position >= len(result.token_ids):
                continue
            edited, parameters = edits.apply(row, logits[row]), as_float32(request.params.top_w)
            step = analyser.analyse(edited, parameters, request.params.rule)
            exact_steps[row].analyse(position, edited, parameters, request.params.rule)
            edits.add_token(row, result.token_ids[position])
            agreed[row] += (step.kept, step.certified) == (result.kept[position], result.certified[position])
            steps[row].append(step)
            advance(1)
    exact = [each.steps for each in exact_steps]
    return (AnalysedSequence(*fields) for fields in zip(batch, steps, agreed, exact, strict=True))


def recomputed_logits(probe: LogitsProbe, batch: Sequence[GeneratedSequence]) -> Iterator[NDArray[np.float32]]:
    """Yield the logits [batch, vocab] of every step, before edits. The logits of finished rows are arbitrary."""
    lengths = [len(sequence.result.token_ids) for sequence in batch]
    width = max(len(sequence.request.prompt) for sequence in batch)
    ids, mask = (np.zeros((len(batch), width), np.int64) for _ in range(2))
    for row, sequence in enumerate(batch):
        start = width - len(sequence.request.prompt)
        ids[row, start:], mask[row, start:] = sequence.request.prompt, 1
    probe.start(len(batch))
    for position in range(max(lengths)):
        yield probe.step(ids, mask)
        alive = np.array([[position + 1 < length] for length in lengths])
        tokens = [
            sequence.result.token_ids[min(position, length - 1)] if length else 0
            for sequence, length in zip(batch, lengths, strict=True)
        ]
        ids = np.array(tokens, np.int64)[:, None]
        mask = np.concatenate([mask, alive.astype(np.int64)], axis=1)
