"""Generate like `topw generate`, then recompute every step's logits, and compare each kept set with the one without
distances.

The exported graph has no logits output, so the part of the graph before the sampler runs again on the generated tokens,
with the same cache and padding. Each kept set is compared with the size and certificate that the first run reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.export.verification.reference import CacheDriver, decoder_driver
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.runtime.rule_settings import RuleSetting, parse_value, split_pair
from topw_deploy.runtime.sequence import Sequence as Prepared
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import ALIASES, GREEDY_BELOW, PARAMETER_NAMES, unknown_name
from topw_deploy.sampling.reference import Crop
from topw_deploy.sampling.rules import RULE_OF_VALUE, TOP_W, RuleCrop, RuleParameters, kept_set
from topw_deploy.text import count_text
from topw_lab.running import prepare_prompt
from topw_lab.stats.exact import ExactStep, analyse_exact, evenly_spaced_steps, require_objective

Floats = NDArray[np.float64]

_SWEPT = ("preset", *PARAMETER_NAMES, *RULE_OF_VALUE)


def settings_of(given: Mapping[str, Any], sweeps: Sequence[str]) -> list[RuleSetting]:
    """Combine the parameters `given` with every combination of the swept values, one setting each.

    sweeps: texts such as "temperature=0.5,1,2".

    Raises ParameterError for a sweep of another form, or a name that is unknown, swept twice or in `given`.
    """
    columns: dict[str, list[Any]] = {}
    for text in sweeps:
        name, values = split_pair(text)
        name = ALIASES.get(name, name)
        if values is None:
            raise ParameterError(f"the sweep {text!r} is not NAME=V1,V2,...; write for example temperature=0.5,1,2.")
        if name not in _SWEPT:
            raise unknown_name(name, _SWEPT)
        if name in columns or name in given:
            raise ParameterError(f"{name} is given twice; give all its values in one --sweep.", name)
        columns[name] = list(dict.fromkeys(parse_value(name, value.strip()) for value in values.split(",")))
    settings = []
    for combination in itertools.product(*columns.values()):
        swept = dict(zip(columns, combination, strict=True))
        shown = {name: value if isinstance(value, str) else f"{value:g}" for name, value in swept.items()}
        parts = (value if name == "preset" else f"{name} {value}" for name, value in shown.items())
        settings.append(RuleSetting(", ".join(parts), {**given, **swept}))
    return settings


@dataclass(frozen=True, slots=True)
class StepAnalysis:
    """The kept set of one step. Under a rule other than Top-W, no distance is measured.

    kept: number of tokens in the set.
    mass: probability of the set under the softmax at the selection temperature.
    entropy: entropy of the whole softmax at the sampling temperature, in nats.
    kept_entropy: entropy of the renormalised set at the sampling temperature, in nats.
    added: tokens that are in the set only because of distances.
    dropped: tokens that are not in the set only because of distances.
    """

    kept: int
    certified: bool
    mass: float
    entropy: float
    kept_entropy: float
    added: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def is_changed(self) -> bool:
        """Whether distances changed the kept set."""
        return bool(self.added or self.dropped)


def analyse(
    logits: NDArray[np.float32],
    parameters: TopWParameters,
    rule: RuleParameters,
    options: TopWOptions,
    geometry: Geometry,
) -> StepAnalysis:
    """Recompute the kept set of one step with the reference, from edited logits [V].

    parameters: Top-W's, rounded to float32. The temperatures apply to every rule.
    rule: the sampling rule of the step.
    options, geometry: of the export.
    """
    temperature, selection = parameters.temperature, parameters.selection_temperature
    found: Crop | RuleCrop
    if rule.chosen is not TOP_W:
        found = kept_set(logits, rule.chosen, rule.values, temperature=temperature, selection_temperature=selection)
        without = found.kept
    else:
        found = crop(logits, parameters, options, geometry)
        # A certified set is the same for every geom_scale >= 0 (docs/contract/theory.md, T2).
        without = found.kept
        if not found.certified:
            plain = replace(options, metric="uniform", potential="nearest")
            without = crop(logits, replace(parameters, geom_scale=0.0), plain).kept
    return StepAnalysis(
        certified=found.certified,
        kept=len(found.kept),
        mass=float(softmax(logits, selection or temperature)[found.kept].sum()),
        entropy=entropy(softmax(logits, temperature)),
        kept_entropy=entropy(softmax(logits[found.kept], temperature)),
        added=tuple(np.setdiff1d(found.kept, without).tolist()),
        dropped=tuple(np.setdiff1d(without, found.kept).tolist()),
    )


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    """Probabilities [V]. Below `GREEDY_BELOW`, the first largest logit has probability 1."""
    row = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    w: Floats = np.exp((row - row.max()) / temperature)
    return w / w.sum()


def entropy(p: Floats) -> float:
    """Entropy of the probabilities `p` in nats. Probabilities of 0 are allowed."""
    positive = p[p > 0]
    return float(max(0.0, -(positive * np.log(positive)).sum()))


@dataclass
class AnalysedText:
    """A generated text and the analysis of its steps.

    request: the prompt with its parameters.
    steps: the analysed steps.
    agreed: number of steps whose kept set has the size and certificate that the graph reported.
    exact: the steps analysed under the exact objective, by position from 0.
    """

    request: Prepared
    result: GenerationResult
    steps: list[StepAnalysis] = field(default_factory=list)
    agreed: int = 0
    exact: dict[int, ExactStep] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectedRuns:
    """Result of `collect`.

    runs: each setting with its texts: all prompts in order with the first seed, then with the next seed, and so on.
    tokens: the text of each token that distances added or dropped, by token id.
    prompts: number of prompts.
    """

    runs: list[tuple[RuleSetting, list[AnalysedText]]]
    tokens: dict[int, str]
    prompts: int


def collect(
    folder: Path,
    prompts: Sequence[tuple[Any, str]],
    settings: Sequence[RuleSetting],
    *,
    batch_size: int = 1,
    generation: Mapping[str, Any] | None = None,
    seeds: int = 1,
    exact_steps: int = 0,
    exact_pool: int | None = None,
    progress: Progress = SILENT,
) -> CollectedRuns:
    """Generate from every prompt under every setting and analyse each step.

    folder: an exported model.
    prompts: (text, token ids or messages; place of the prompt in its source, for error messages) of each.
    batch_size: prompts per batch; batching can change the last bits of logits.
    generation: further parameters of `TopWModel.generate`.
    seeds: number of texts per prompt; their seeds are consecutive and start with the seed in `generation`.
    exact_steps: analyse this many steps of each setting, evenly spaced over its texts, under the exact objective F;
        needs the extra `exact`.
    exact_pool: F is computed among this many likeliest tokens, at least the export's top_m. None: top_m.

    Raises ManifestError for a folder without a decoder, PromptError for a prompt longer than the context,
    ParameterError for settings or a pool that the exact objective does not allow, and the errors of `TopWModel`.
    """
    with TopWModel.from_pretrained(folder) as model:
        manifest, tokenizer, options = model.manifest, model.tokenizer, model.manifest.sampler.options
        ids = [list(prepare_prompt(model, *prompt).prompt) for prompt in prompts]
        geometry = read_geometry(folder, manifest)
        first = {"seed": 0, **(generation or {})}
        by_setting = [
            [{**first, **setting.parameters, "seed": first["seed"] + offset} for offset in range(seeds)]
            for setting in settings
        ]
        # Prepare one prompt with all of them first: wrong parameters are refused before anything is generated.
        requests = [model.prepare(ids[:1], **given)[0] for by_seed in by_setting for given in by_seed]
        most = options.top_m if exact_pool is None else exact_pool
        if most < options.top_m:
            raise ParameterError(
                f"exact_pool is {most}, but must be at least the export's top_m of {options.top_m}.", "exact_pool"
            )
        for request in requests if exact_steps else ():
            require_objective(request.params.top_w)
        what = f"{count_text(len(ids), 'prompt')} under {count_text(len(settings), 'setting')}"
        progress.say(f"Generating from {what}")
        generated: list[list[list[AnalysedText]]] = []
        with progress.bar(len(ids) * len(settings) * seeds, "prompts") as advance:
            for by_seed in by_setting:
                generated.append([])
                for given, start in itertools.product(by_seed, range(0, len(ids), batch_size)):
                    part = ids[start : start + batch_size]
                    pairs = zip(model.prepare(part, **given), model.generate(part, **given), strict=True)
                    generated[-1].append([AnalysedText(*pair) for pair in pairs])
                    advance(len(part))
    progress.say("Analysing every step")
    probe = decoder_driver(folder, manifest.decoder)
    runs = []
    total = sum(len(text.result.token_ids) for batches in generated for batch in batches for text in batch)
    with progress.bar(total, "tokens") as advance:
        for setting, batches in zip(settings, generated, strict=True):
            texts = [text for batch in batches for text in batch]
            chosen = evenly_spaced_steps([len(text.result.token_ids) for text in texts], exact_steps)
            places = dict(zip(map(id, texts), chosen, strict=True))
            for batch in batches:
                for text, position, logits in _steps(probe, batch):
                    params, result = text.request.params, text.result
                    parameters = as_float32(params.top_w)
                    step = analyse(logits, parameters, params.rule, options, geometry)
                    if position in places[id(text)]:
                        text.exact[position] = analyse_exact(
                            logits, parameters, params.rule, options=options, geometry=geometry, most=most
                        )
                    text.agreed += (step.kept, step.certified) == (result.kept[position], result.certified[position])
                    text.steps.append(step)
                    advance(1)
            runs.append((setting, texts))
    steps = [step for _, texts in runs for text in texts for step in text.steps]
    moved = sorted({token for step in steps for token in (*step.added, *step.dropped)})
    return CollectedRuns(
        runs, {token: tokenizer.decode([token], skip_special_tokens=False) for token in moved}, len(ids)
    )


def _steps(
    probe: CacheDriver, batch: Sequence[AnalysedText]
) -> Iterator[tuple[AnalysedText, int, NDArray[np.float32]]]:
    """Yield (text, position, edited logits [V]) of every step of a batch."""
    edits = EditInputs(len(batch))
    width = max(len(text.request.prompt) for text in batch)
    ids, mask = (np.zeros((len(batch), width), np.int64) for _ in range(2))
    for slot, text in enumerate(batch):
        start = width - len(text.request.prompt)
        ids[slot, start:], mask[slot, start:] = text.request.prompt, 1
        edits.set(slot, text.request)
    probe.start(len(batch))
    for position in range(max(len(text.result.token_ids) for text in batch)):
        logits = probe.step(ids, mask)
        ids, alive = np.zeros((len(batch), 1), np.int64), np.zeros((len(batch), 1), np.int64)
        for slot, text in enumerate(batch):
            tokens = text.result.token_ids
            if position < len(tokens):
                yield text, position, edits.apply(slot, logits[slot])
                edits.add_token(slot, tokens[position])
                ids[slot], alive[slot] = tokens[position], position + 1 < len(tokens)
        mask = np.concatenate([mask, alive], axis=1)
