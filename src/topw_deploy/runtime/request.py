"""Resolve every parameter for every row of a request.

Precedence: the request, its preset (Top-W only), its `generation_config`, the model's `generation_config.json`, the
export's defaults (Top-W only), this package's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import Manifest
from topw_deploy.runtime.generation_config import read_settings
from topw_deploy.runtime.limits import Limits, check_prompt
from topw_deploy.runtime.parameters import PARAMETERS, REQUEST_PARAMETERS, check_names, row_values
from topw_deploy.runtime.rules import DEFAULT_RULE, check_rule_exported, check_top_h_pool, resolve_rule
from topw_deploy.runtime.structured.constraint import Constraint
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.presets import preset_parameters, with_raw_scale
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, RuleParameters
from topw_deploy.sampling.seeds import fresh_seed

CONFIG_PARAMETER = "generation_config"
_CONFIG_PARAMETERS = {
    name: REQUEST_PARAMETERS[name] for name in ("num_return_sequences", "skip_special_tokens", "add_special_tokens")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """Prompt and parameters of one sequence.

    prompt: token ids, at least one.
    rule: the sampling rule. The temperatures of every rule are in `top_w`.
    budget: maximum new tokens, >= 0.
    eos_token_ids: ids that end the row: EOS, unless `ignore_eos` is given, and the stop_token_ids.
    pad_token_id: what the graph reads in steps after the row's end.
    min_new_tokens: tokens before which EOS and stop strings have no effect.
    allowed_token_ids: the only ids that can be drawn; empty for all.
    constraint: what the row's text must match, or None.
    logprobs, prompt_logprobs: alternatives per drawn token and per token of the prompt; None for no log-probabilities
        under the model.
    """

    prompt: tuple[int, ...]
    top_w: TopWParameters
    budget: int
    min_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    stop_strings: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    suppress_tokens: tuple[int, ...]
    allowed_token_ids: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    no_repeat_ngram_size: int
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: Constraint | None
    seed: int
    sample: int
    rule: RuleParameters = DEFAULT_RULE

    @property
    def needs_scores(self) -> bool:
        """Whether the request asks for log-probabilities under the model."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def has_edits(self) -> bool:
        """Whether the request has penalties, biases or bans."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.suppress_tokens
            or self.bad_words_ids
            or self.no_repeat_ngram_size
            or (self.min_new_tokens and self.eos_token_ids)
        )


def split_parameters(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a call's parameters. Returns (row parameters, values of REQUEST_PARAMETERS with defaults).

    Of the row parameters only the names are checked. The second mapping has the row parameters of the call's
    generation_config under `generation_config`.
    """
    named = check_names(given)
    config: dict[str, Any] = {}
    if CONFIG_PARAMETER in named:
        stated = REQUEST_PARAMETERS[CONFIG_PARAMETER].parse(CONFIG_PARAMETER, named.pop(CONFIG_PARAMETER))
        config = read_settings(stated, CONFIG_PARAMETER, {**PARAMETERS, **_CONFIG_PARAMETERS})
    whole = {
        name: p.parse(name, named.pop(name)) if name in named else config.pop(name, p.default)
        for name, p in REQUEST_PARAMETERS.items()
    }
    return named, {**whole, CONFIG_PARAMETER: {name: value for name, value in config.items() if name in PARAMETERS}}


def resolve_rows(
    prompts: Sequence[Sequence[int]],
    given: Mapping[str, Any],
    model: Mapping[str, Any],
    exported: TopWParameters | Mapping[str, Any],
    limits: Limits,
    samples: int = 1,
    *,
    config: Mapping[str, Any] | None = None,
    geometry: tuple[str, int | None] = ("uniform", None),
    median_distance: float | None = None,
) -> list[RowRequest]:
    """Resolve the parameters of each prompt and sample to a RowRequest; a prompt's samples are adjacent.

    given: row parameters from `split`, one value for all prompts or one for each.
    model: defaults of the model's generation config.
    exported: defaults of the export.
    config: row parameters of `generation_config`.
    geometry: (metric, width of the embeddings or None), for `preset`.
    median_distance: the median distance of likely pairs of tokens, for `geom_unit`; None if unknown.

    Raises ParameterError for a bad value, PromptError for a prompt that is empty, too long or has unknown ids.
    """
    columns = {name: row_values(name, value, len(prompts)) for name, value in given.items()}

    def with_scale_and_preset(stated: Mapping[str, Any]) -> Mapping[str, Any]:
        scaled = with_raw_scale(stated, median_distance) if "geom_unit" in stated else stated
        return _with_preset(scaled, geometry)

    defaults = asdict(exported) if isinstance(exported, TopWParameters) else exported
    stated = with_scale_and_preset(config or {}), with_scale_and_preset(model)
    rows: list[RowRequest] = []
    for index, prompt in enumerate(prompts):
        request = {name: column[index] for name, column in columns.items() if column[index] is not None}
        sources = _Sources(with_scale_and_preset(request), *stated)
        check_prompt(prompt, limits, f"prompt {index}" if len(prompts) > 1 else "the prompt")
        seed = sources.get("seed")
        seed = fresh_seed() if seed is None else seed
        rows += [_resolve_row(tuple(prompt), sources, defaults, limits, seed, sample) for sample in range(samples)]
    return rows


def new_resolver(manifest: Manifest, model: Mapping[str, Any]) -> Callable[..., list[RowRequest]]:
    """Bind `resolve_rows` to the defaults of a model and of its export, so that requests do not read the manifest."""
    return partial(
        resolve_rows,
        model=model,
        exported=manifest.stated_defaults,
        geometry=manifest.sampler.geometry,
        median_distance=manifest.median_distance,
    )


def _with_preset(stated: Mapping[str, Any], geometry: tuple[str, int | None]) -> Mapping[str, Any]:
    return {**preset_parameters(stated["preset"], *geometry), **stated} if "preset" in stated else stated


class _Sources:
    """Where a row's parameters are stated: its request, the request's generation_config, and the model's own.

    all: the three, the first to win before the others.
    """

    def __init__(self, request: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        self.all = (request, config, model)
        self.request, self.config, self.model = self.all

    def get(self, name: str, default: Any = None) -> Any:
        """The value of the first source that states `name`, else `default`."""
        return next((source[name] for source in self.all if name in source), default)

    def value(self, name: str) -> Any:
        """The value of the first source that states `name`, else this package's default."""
        return self.get(name, PARAMETERS[name].default)

    def name_in(self, source: Mapping[str, Any], name: str) -> str:
        """The name of a parameter for messages, with the source where it matters."""
        return f"{CONFIG_PARAMETER}: {name}" if source is self.config else name

    def check_ids(self, name: str, ids: Iterable[int], limits: Limits) -> None:
        """Raises ParameterError for an id of the parameter `name` that the vocabulary does not have."""
        where = next((source for source in self.all if name in source), self.model)
        for token in ids:
            if token >= limits.vocab_size:
                raise ParameterError(
                    f"{self.name_in(where, name)} names the token id {token}, but ids go from 0 to "
                    f"{limits.vocab_size - 1}.",
                    name,
                )

    def check_count(self, name: str, limits: Limits) -> None:
        """Raises ParameterError if the parameter `name` asks for more tokens than the vocabulary has."""
        count = self.value(name)
        if count is not None and count > limits.vocab_size:
            where = next(source for source in self.all if name in source)
            raise ParameterError(
                f"{self.name_in(where, name)} is {count}, but the vocabulary has {limits.vocab_size} tokens; give at "
                "most that.",
                name,
            )


def _resolve_row(
    prompt: tuple[int, ...],
    sources: _Sources,
    exported: Mapping[str, Any],
    limits: Limits,
    seed: int,
    sample: int,
) -> RowRequest:
    value = sources.value
    eos, stop = frozenset(value("eos_token_id")), frozenset(value("stop_token_ids"))
    for name in ("eos_token_id", "stop_token_ids", "logit_bias", "suppress_tokens", "allowed_token_ids"):
        sources.check_ids(name, value(name), limits)
    for word in value("bad_words_ids"):
        sources.check_ids("bad_words_ids", word, limits)
    for name in ("logprobs", "prompt_logprobs"):
        sources.check_count(name, limits)
    pad, constraint = value("pad_token_id"), value("structured_outputs")
    return RowRequest(
        prompt=prompt,
        top_w=_resolve_top_w(sources, exported),
        rule=_resolve_rule(sources, limits),
        budget=_resolve_budget(len(prompt), sources, limits),
        min_new_tokens=max(value("min_new_tokens"), value("min_length") - len(prompt)),
        eos_token_ids=stop if value("ignore_eos") else eos | stop,
        pad_token_id=pad if pad is not None and pad < limits.vocab_size else min(eos, default=0),
        stop_strings=value("stop_strings"),
        constraint=None if constraint is None or constraint.kind == "text" else constraint,
        seed=seed,
        sample=sample,
        **{
            name: value(name)
            for name in (
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "suppress_tokens",
                "allowed_token_ids",
                "bad_words_ids",
                "no_repeat_ngram_size",
                "logprobs",
                "prompt_logprobs",
            )
        },
    )


def _resolve_top_w(sources: _Sources, exported: Mapping[str, Any]) -> TopWParameters:
    values = {name: sources.get(name, exported[name]) for name in PARAMETER_NAMES}
    for source in sources.all:  # first with do_sample or temperature
        sampled = source.get("do_sample")
        if sampled is False:
            values["temperature"] = 0.0
        elif sampled and source is not sources.model and TopWParameters(**values).greedy:
            if "temperature" in source:
                raise ParameterError(
                    f"{sources.name_in(source, 'do_sample')} is True, but temperature is {source['temperature']!r}, "
                    "which is greedy; give a higher temperature.",
                    "temperature",
                )
            values["temperature"] = 1.0
        if sampled is not None or "temperature" in source:
            break
    return TopWParameters(**values)


def _resolve_rule(sources: _Sources, limits: Limits) -> RuleParameters:
    """The sampling rule of the first source that names or implies one, else Top-W."""
    for source in sources.all:
        own = {name: source[name] for name in RULE_PARAMETER_NAMES if name in source}
        if own:
            rule = resolve_rule(sources.get, own)
            check_rule_exported(rule, limits.rules)
            check_top_h_pool(rule, limits.longest_pool, limits.vocab_size)
            return rule
    return DEFAULT_RULE


def _resolve_budget(prompt: int, sources: _Sources, limits: Limits) -> int:
    """The maximum number of new tokens after a prompt of `prompt` tokens."""
    if "max_new_tokens" in sources.request and "max_length" in sources.request:
        raise ParameterError("max_new_tokens and max_length are both given; give one of them.")
    wanted = PARAMETERS["max_new_tokens"].default
    for source in sources.all:
        if "max_new_tokens" in source:
            wanted = source["max_new_tokens"]
            break
        if source.get("max_length", 0) > prompt:
            wanted = source["max_length"] - prompt
            break
        if "max_length" in source and source is not sources.model:
            raise PromptError(
                f"the prompt has {prompt} tokens, but {sources.name_in(source, 'max_length')} is "
                f"{source['max_length']}; raise it."
            )
    if wanted == 0 and sources.value("prompt_logprobs") is None:
        raise ParameterError(
            f"{sources.name_in(source, 'max_new_tokens')} is 0, but must be an integer >= 1, or 0 with "
            "prompt_logprobs.",
            "max_new_tokens",
        )
    return min(wanted, limits.tokens - prompt)


def reading_request(request: RowRequest) -> RowRequest:
    """The request that reads the first token of a prompt which is read token by token: greedy, without edits."""
    return replace(
        request,
        prompt=request.prompt[:1],
        top_w=TopWParameters(temperature=0.0),
        rule=DEFAULT_RULE,
        min_new_tokens=0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        suppress_tokens=(),
        allowed_token_ids=(),
        bad_words_ids=(),
        no_repeat_ngram_size=0,
    )
