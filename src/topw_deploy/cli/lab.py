"""`topw stats`, `topw compare` and `topw lm-eval`. Reports go to stdout, and progress to stderr."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import click

from topw_deploy import install
from topw_deploy.cli.options import (
    CONTEXT,
    COUNT,
    FILE,
    NEEDS_EXPORT,
    PATH,
    PATH_OR_STREAM,
    json_file_option,
    opening_options,
    option_group,
    parameter_options,
    quiet_option,
    take_given,
    take_opening,
)
from topw_deploy.cli.prompts import PromptLine, read_prompt_lines, read_text_lines, text_lines
from topw_deploy.cli.terminal import check_output, check_picture, progress, read_source, waiting, write_report
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.folders import atomic_file
from topw_deploy.runtime.parameters import OF_KEPT_SET
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, TOP_W
from topw_deploy.text import count_text, json_text

PROMPTS = resources.files("topw_lab") / "prompts.txt"
"""The prompts of `topw stats` and `topw compare` if none are given."""

_text_options = option_group(
    click.argument("prompts", metavar="[PROMPT]...", nargs=-1),
    click.option(
        *("-f", "--file", "--prompts", "prompt_file"),
        type=PATH_OR_STREAM,
        help="Prompts: UTF-8 text, one per line, or JSON lines if the name ends in .jsonl; - is text on standard "
        "input.  [default: 24 beginnings of texts about Python]",
    ),
    click.option("--limit", type=COUNT, help="Use at most this many prompts."),
    click.option("--chat", is_flag=True, help="Use the chat template: a prompt is the user's message."),
    click.option("--system", metavar="TEXT", help="System message of the chat."),
    click.option(
        *("-n", "--max-new-tokens", "--max-tokens", "max_new_tokens"),
        type=COUNT,
        default=64,
        help="Maximum number of tokens per text.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of each prompt's draws."),
    click.option("--ignore-eos", is_flag=True, help="Continue after the end of sequence, so that lengths are equal."),
    quiet_option,
)
"""The arguments of `topw stats` and `topw compare` that say what is generated; `_read_prompts` reads the prompts."""


@click.command(name="stats", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("folder", metavar="MODEL", type=PATH)
@_text_options
@click.option("--seeds", type=COUNT, default=1, help="Texts of each prompt, by consecutive seeds.")
@click.option("--batch-size", type=COUNT, default=1, help="Prompts per batch.")
@parameter_options(*OF_KEPT_SET)
@click.option(
    "--sweep",
    metavar="NAME=V1,V2,...",
    multiple=True,
    help="Compare these values of a parameter, or presets. Repeat the option to compare every combination.",
)
@click.option("--tokens", type=click.IntRange(min=0), default=10, help="Maximum number of tokens per list.")
@json_file_option
@click.option("--exact", is_flag=True, help="Also compare kept sets under the paper's exact objective (needs POT).")
@click.option(
    "--exact-steps",
    type=COUNT,
    metavar="N",
    help="Maximum number of steps for --exact per setting, evenly spaced.  [default: 200]",
)
@click.option(
    "--exact-pool",
    type=COUNT,
    metavar="N",
    help="Compute --exact among this many likeliest tokens.  [default: the export's top_m]",
)
@click.option("--plot", type=FILE, help="Draw the report as .png, .svg or .pdf.")
def stats(folder: Path, json_file: Path | None, plot: Path | None, **values: Any) -> None:
    """Generate from prompts with the exported model in the folder MODEL and report what Top-W, or another rule, did.

    The report shows how many steps were certified, the sizes, mass and entropy of the kept sets by position, how often
    token geometry changed a set (compared with geom_scale 0 at the same logits), and which tokens it kept or dropped.
    The text is what `topw generate` produces for the seed.

    With --exact, the report also shows how far the kept sets of Top-W and of other rules, at the steps of these texts,
    are from minimising the paper's exact objective with Top-W's parameters. The optimal transport in it is solved by
    linear programming. --plot then draws this comparison.
    """
    install.require("`topw stats`", "export")
    exact = values["exact"]
    if exact:
        install.require("`topw stats --exact`", "exact")
    elif values["exact_steps"] is not None or values["exact_pool"] is not None:
        raise click.UsageError("--exact-steps and --exact-pool need --exact.")
    lines = _read_prompts(values)
    for line in lines:
        if line.parameters:
            raise PromptError(
                f"{line.where} has {next(iter(line.parameters))}, but all texts have the same parameters."
            )
    # Import late, for fast --help and usage errors.
    from topw_lab.stats.collect import collect, settings_of
    from topw_lab.stats.exact_report import exact_lines, save_exact_plot, summarise_exact
    from topw_lab.stats.report import report_lines, save_plot, summarise

    given = take_given(values, ("preset", "geom_unit", *PARAMETER_NAMES, *RULE_PARAMETER_NAMES))
    try:
        settings = settings_of(given, values["sweep"])
    except ParameterError as error:
        raise ParameterError(str(error), "sweep") from None
    check_output(json_file, "json_file")
    check_picture(plot, (".png", ".svg", ".pdf"))
    generation = {name: values[name] for name in ("max_new_tokens", "seed", "ignore_eos")}
    with waiting("Working"):
        collected = collect(
            folder,
            [(line.prompt, line.where) for line in lines],
            settings,
            batch_size=values["batch_size"],
            generation=generation,
            seeds=values["seeds"],
            exact_steps=(values["exact_steps"] or 200) if exact else 0,
            exact_pool=values["exact_pool"],
            progress=progress(values["quiet"]),
        )
    summaries = summarise(collected)
    exact_summaries = summarise_exact(collected) if exact else []
    names = ("chat", "system", "max_new_tokens", "seed", "seeds", "batch_size")
    document: dict[str, Any] = {"folder": str(folder)} | {name: values[name] for name in names}
    document |= {name: given.get(name) for name in ("preset", "geom_unit")}
    document["settings"] = [asdict(summary) for summary in summaries]
    report = list(report_lines(summaries, values["tokens"]))
    if exact:
        document["exact"] = [asdict(summary) for summary in exact_summaries]
        report += ["", *exact_lines(exact_summaries)]
    write_report(report, document, json_file)
    if plot is not None:
        seeds = f"seed {values['seed']}" if values["seeds"] == 1 else f"{values['seeds']} seeds"
        subject = f"{folder.resolve().name}, {count_text(len(lines), 'prompt')}, {seeds}"
        if not exact:
            rule = "Top-W" if summaries[0].rule == TOP_W.name else f"the rule {summaries[0].rule}"
            save_plot(summaries, plot, f"What {rule} did: {subject}")
        else:
            save_exact_plot(exact_summaries, plot, f"Kept sets under the exact objective: {subject}")


def _read_prompts(values: dict[str, Any], *, scored: bool = False) -> list[PromptLine]:
    """The prompts of `_text_options`. scored: as in `read_prompt_lines`."""
    given, file = values["prompts"], values["prompt_file"]
    form = {"chat": values["chat"], "system": values["system"]}
    if form["system"] is not None and not form["chat"]:
        raise click.UsageError("--system needs --chat.")
    if given and file is not None:
        raise click.UsageError("give PROMPT or --file, not both.")
    if given:
        lines = text_lines([(text, f"prompt {number}") for number, text in enumerate(given, 1)], **form)
    elif file is not None and file.suffix.lower() in (".jsonl", ".ndjson"):
        lines = read_prompt_lines(*read_source(file), {}, scored=scored, **form)
    else:
        lines = read_text_lines(
            *((PROMPTS.read_bytes(), "the bundled prompts") if file is None else read_source(file)), **form
        )
    return lines[: values["limit"]]


DEFAULT_RULES = "top_w,min_p,top_p,top_h,top_k,none"


@click.command(
    name="compare", context_settings=CONTEXT, epilog="Needs the extra [compare]; an error shows how to install it."
)
@click.argument("folder", metavar="MODEL", type=PATH)
@_text_options
@click.option(
    "--rules",
    metavar="RULE[=VALUE],...",
    default=DEFAULT_RULES,
    help="Rules and their values; more of a rule's parameters follow as :NAME=VALUE.",
)
@click.option("--temperatures", metavar="T1,T2,...", default="0.5,1,1.5,2", help="Temperatures.")
@click.option("--samples", type=COUNT, default=4, help="Texts per prompt, rule and temperature.")
@click.option("--batch-size", type=COUNT, default=8, help="Texts generated at once.")
@click.option(
    "--fast", is_flag=True, help="Twice as fast; then a text can depend on what ran before, by last bits of logits."
)
@opening_options
@json_file_option
@click.option(
    "--html",
    "html_file",
    type=PATH,
    help="Write one self-contained page: the table, and the texts side by side.",
)
@click.option("--plot", type=FILE, help="Draw accuracy over temperature as .png, .svg or .pdf.")
@click.option("--resume", is_flag=True, help="Generate only what --json's file lacks; it is saved after each rule.")
def compare(
    folder: Path, json_file: Path | None, html_file: Path | None, plot: Path | None, resume: bool, **values: Any
) -> None:
    """Generate from the exported model in the folder MODEL with each rule in --rules, and compare the texts.

    Every rule draws with the same random numbers at every temperature. The report shows perplexity under the model,
    distinct n-grams, self-BLEU, repetition, kept tokens, their probability mass, the certified share and speed. If the
    prompts have accepted answers, as in {"prompt": "2 + 2?", "answers": ["4", "four"]}, it shows accuracy too.

    RULE is top_w, top_k, top_p, min_p, top_h, typical, epsilon, eta, top_n_sigma, p_less, min_k or none (plain
    sampling); `all` stands for all of them; greedy takes the most probable token. VALUE is its main parameter; without
    it, top_k is 50, top_p 0.9, min_p 0.1, typical 0.95, epsilon 0.0003, eta 0.0002, and the others have their rule's
    default. For example:
    --rules top_w,top_w:preset=lively,min_p=0.05,top_h=0.4:top_h_pool=50

    Perplexity needs a folder exported with --with-logits, and mass one exported with --with-mass.
    """
    if resume and (json_file is None or str(json_file) == "-"):
        raise click.UsageError("--resume needs --json FILE.")
    install.require("`topw compare`", "compare")
    # Import late, for fast --help and usage errors.
    from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
    from topw_lab.compare.comparison import Comparison, as_dict, compare, report_lines
    from topw_lab.compare.page import page
    from topw_lab.compare.picture import save_plot

    check_output(json_file, "json_file")
    check_output(html_file, "html_file")
    check_picture(plot, (".png", ".svg", ".pdf"))

    def save(comparison: Comparison) -> None:
        if json_file is not None and str(json_file) != "-":
            with atomic_file(json_file) as stream:
                stream.write(json_text(as_dict(comparison), indent=2).encode())

    lines = _read_prompts(values, scored=True)
    if plot is not None and not any(line.answers for line in lines):
        raise click.UsageError("--plot needs prompts with answers, such as examples/questions.jsonl.")
    with waiting("Working"):
        comparison = compare(
            folder,
            [(line.prompt, line.where, line.parameters) for line in lines],
            read_rules(values["rules"]),
            read_temperatures(values["temperatures"]),
            answers=[line.answers for line in lines],
            earlier=_read_report(json_file) if resume and json_file is not None and json_file.exists() else None,
            save=save,
            rows=values["batch_size"],
            exact=not values["fast"],
            opening=take_opening(values),
            progress=progress(values["quiet"]),
            **{name: values[name] for name in ("samples", "max_new_tokens", "seed", "ignore_eos")},
        )
    write_report(report_lines(comparison), as_dict(comparison), json_file)
    if html_file is not None:
        html_file.write_text(page(comparison), encoding="utf-8")
    if plot is not None:
        save_plot(comparison, plot)


def _read_report(path: Path) -> dict[str, Any]:
    """Read the file of an earlier --json. Raises ParameterError if it is not a JSON object."""
    try:
        report = json.loads(read_source(path)[0])
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise ParameterError(
            f"json_file is {path}, which is not a report of `topw compare`; name another.", "json_file"
        )
    return report


_PASS_ARGUMENTS = {**CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(name="lm-eval", context_settings=_PASS_ARGUMENTS)
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness on an exported model: `lm_eval ARGUMENT...` with the model class topw_deploy.

    \b
    topw lm-eval --model_args path=MODEL,temperature=1.5 --tasks gsm8k_cot

    The default is --model topw_deploy. See docs/guide/evaluation.md for --model_args, and `topw lm-eval run --help` for
    the harness's own options.
    """
    from topw_lab.harness import run

    run(arguments)
