"""`topw stats`: show what a sampling rule did. The report goes to stdout, and progress to stderr."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from topw_deploy import install
from topw_deploy.cli.files import check_output, check_picture, read_source, write_json
from topw_deploy.cli.options import (
    CONTEXT,
    NEEDS_EXPORT,
    parameter_options,
    quiet_option,
    require_folder_first,
    take_given,
)
from topw_deploy.cli.prompt_lines import read_prompt_lines, read_text_lines
from topw_deploy.cli.terminal import say, say_json
from topw_deploy.errors import PromptError
from topw_deploy.runtime.parameters import OF_KEPT_SET
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, TOP_W
from topw_deploy.text import count_text

if TYPE_CHECKING:
    from topw_lab.stats.exact_report import ExactSummary
    from topw_lab.stats.report import SettingSummary


@click.command(name="stats", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Read prompts from a file (UTF-8, one per line); - is standard input.",
)
@click.option(
    "--prompts-jsonl",
    type=click.Path(path_type=Path, allow_dash=True),
    help='Read prompts from JSON lines: "text" or {"prompt": "text"}.',
)
@click.option("--limit", type=click.IntRange(min=1), help="Use at most this many prompts.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Maximum number of tokens per prompt.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of each prompt's draws.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Texts of each prompt, by consecutive seeds.",
)
@click.option("--ignore-eos", is_flag=True, help="Continue after the end of sequence.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts per batch.")
@parameter_options(*OF_KEPT_SET)
@click.option(
    "--sweep",
    metavar="NAME=V1,V2,...",
    multiple=True,
    help="Compare these values of a parameter. Repeat the option to compare every combination.",
)
@click.option(
    "--tokens", type=click.IntRange(min=0), default=10, show_default=True, help="Maximum number of tokens per list."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the report as JSON; - is standard output.",
)
@click.option("--exact", is_flag=True, help="Also compare kept sets under the paper's exact objective (needs POT).")
@click.option(
    "--exact-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of steps for --exact per setting, evenly spaced.  [default: 200]",
)
@click.option(
    "--exact-pool",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compute --exact among this many likeliest tokens.  [default: the export's top_m]",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the report as .png, .svg or .pdf.")
@quiet_option
def command(
    folder: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    prompts_jsonl: Path | None,
    limit: int | None,
    sweep: tuple[str, ...],
    json_file: Path | None,
    exact: bool,
    plot: Path | None,
    **values: Any,
) -> None:
    """Generate from prompts with the exported model in the folder OUT and report what Top-W, or another rule, did.

    Give prompts as PROMPT, --prompt-file or --prompts-jsonl. The report shows how many steps were certified, the sizes,
    mass and entropy of the kept sets by position, how often token geometry changed a set (compared with geom_scale 0 at
    the same logits), and which tokens it kept or dropped. The text is what `topw generate` produces for the seed.

    With --exact, the report also shows how far the kept sets of Top-W and of other rules, at the steps of these texts,
    are from minimising the paper's exact objective with Top-W's parameters. The optimal transport in it is solved by
    linear programming. --plot then draws this comparison.
    """
    require_folder_first(folder, prompts)
    install.require("`topw stats`", "export")
    if exact:
        install.require("`topw stats --exact`", "exact")
    elif values["exact_steps"] is not None or values["exact_pool"] is not None:
        raise click.UsageError("--exact-steps and --exact-pool need --exact.")
    texts = _read_prompts(prompts, prompt_file, prompts_jsonl)[:limit]
    # Import late, for fast --help and usage errors.
    from topw_deploy.cli.progress import progress
    from topw_lab.stats.collect import ExactRequest, collect, settings_of
    from topw_lab.stats.exact_report import save_exact_plot, summarise_exact
    from topw_lab.stats.report import save_plot, summarise

    settings = settings_of(take_given(values, (*PARAMETER_NAMES, *RULE_PARAMETER_NAMES)), sweep)
    exact_request = ExactRequest(values["exact_steps"] or 200, values["exact_pool"]) if exact else None
    check_output(json_file, "json_file")
    check_picture(plot, (".png", ".svg", ".pdf"))
    generation = {name: values[name] for name in ("max_new_tokens", "seed", "ignore_eos")}
    generation |= {name: values[name] for name in ("preset", "geom_unit") if values[name] is not None}
    collected = collect(
        folder,
        texts,
        settings,
        batch_size=values["batch_size"],
        generation=generation,
        seeds=values["seeds"],
        exact=exact_request,
        progress=progress(values["quiet"]),
    )
    summaries = summarise(collected)
    exact_summaries = summarise_exact(collected) if exact else None
    _write_report(summaries, exact_summaries, folder, values, json_file)
    if plot is not None:
        seeds = f"seed {values['seed']}" if values["seeds"] == 1 else f"{values['seeds']} seeds"
        subject = f"{folder.resolve().name}, {count_text(len(texts), 'prompt')}, {seeds}"
        if exact_summaries is None:
            rule = "Top-W" if summaries[0].rule == TOP_W.name else f"the rule {summaries[0].rule}"
            save_plot(summaries, plot, f"What {rule} did: {subject}")
        else:
            save_exact_plot(exact_summaries, plot, f"Kept sets under the exact objective: {subject}")


def _read_prompts(given: tuple[str, ...], lines: Path | None, json_lines: Path | None) -> list[tuple[str, str]]:
    """The prompts of the command line, each with its place. Raises UsageError unless they are given in one way."""
    if sum((bool(given), lines is not None, json_lines is not None)) != 1:
        raise click.UsageError("give prompts in one way: PROMPT, --prompt-file or --prompts-jsonl.")
    if given:
        return [(text, f"prompt {number}") for number, text in enumerate(given, 1)]
    found = read_text_lines(*read_source(lines)) if lines is not None else []
    if json_lines is not None:
        found = read_prompt_lines(*read_source(json_lines), {}, chat=False, system=None)
    for line in found:
        if line.kind != "prompt" or line.parameters:
            raise PromptError(f'{line.where} has more than a text; write "text" or {{"prompt": "text"}} on each line.')
    return [(line.prompt, line.where) for line in found]


def _write_report(
    summaries: list[SettingSummary],
    exact_summaries: list[ExactSummary] | None,
    folder: Path,
    values: dict[str, Any],
    json_file: Path | None,
) -> None:
    """Print the tables before a file is written, so that the tables are not lost if the disk is full."""
    from topw_lab.stats.exact_report import exact_lines
    from topw_lab.stats.report import report_lines

    if str(json_file) != "-":
        say(*report_lines(summaries, values["tokens"]))
        if exact_summaries is not None:
            say("", *exact_lines(exact_summaries))
    if json_file is not None:
        names = ("max_new_tokens", "seed", "seeds", "batch_size", "preset", "geom_unit")
        options = {name: values[name] for name in names}
        report = {"folder": str(folder), **options, "settings": [asdict(summary) for summary in summaries]}
        if exact_summaries is not None:
            report["exact"] = [asdict(summary) for summary in exact_summaries]
        if str(json_file) == "-":
            say_json(report, indent=2)
        else:
            write_json(report, json_file)
