"""`topw compare`: compare the texts of sampling rules. The report goes to stdout, and progress to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from topw_deploy import install
from topw_deploy.cli.files import check_output, read_source, write_json, write_text
from topw_deploy.cli.options import CONTEXT, opening_options, quiet_option, require_folder_first, take_opening
from topw_deploy.cli.prompt_lines import read_prompt_lines, read_text_lines
from topw_deploy.cli.terminal import say, say_json

if TYPE_CHECKING:
    from topw_lab.compare.comparison import Comparison, Prompt, RuleSummary

DEFAULT_RULES = "top_w,min_p,top_p,top_h,top_k,none"
DEFAULT_TEMPERATURES = "0.5,1,1.5,2"
_JSON_LINES = (".jsonl", ".ndjson")
"""Endings of the names of files with JSON lines; other files are plain text."""


@click.command(
    name="compare",
    context_settings=CONTEXT,
    epilog="Needs the extra [compare]; an error shows how to install it.",
)
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    help="Prompts: UTF-8 text, one per line, or JSON lines if the name ends in .jsonl; - is text on standard input.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use at most this many prompts.")
@click.option(
    "--rules",
    metavar="RULE[=VALUE],...",
    default=DEFAULT_RULES,
    show_default=True,
    help="Rules and their values; more of a rule's parameters follow as :NAME=VALUE.",
)
@click.option(
    "--temperatures", metavar="T1,T2,...", default=DEFAULT_TEMPERATURES, show_default=True, help="Temperatures."
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Texts per prompt, rule and temperature.",
)
@click.option(
    "--max-new-tokens",
    "--max-tokens",
    "max_new_tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Maximum number of tokens per text.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all rules' draws.")
@click.option("--ignore-eos", is_flag=True, help="Continue after the end of sequence, so that lengths are equal.")
@click.option("--chat", is_flag=True, help="Use the chat template: a prompt is the user's message.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Texts generated at once.")
@opening_options
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the report with all texts as JSON; - is standard output.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path),
    help="Write one self-contained page: plots, intervals, and the texts side by side.",
)
@quiet_option
def command(folder: Path, prompts: Path, json_file: Path | None, html_file: Path | None, **values: Any) -> None:
    """Generate from the exported model in the folder OUT with each rule in --rules, and compare the texts.

    Every rule draws with the same random numbers at every temperature. The report shows perplexity under the model,
    distinct n-grams, self-BLEU, repetition, kept tokens, their probability mass, the certified share and speed.

    RULE is top_w, top_k, top_p, min_p, top_h, typical, epsilon, eta, top_n_sigma, p_less, min_k or none (plain
    sampling); `all` stands for all of them. VALUE is its main parameter; without it, top_k is 50, top_p 0.9, min_p 0.1,
    typical 0.95, epsilon 0.0003, eta 0.0002, and the others have their rule's default. For example:
    --rules top_w,top_w:preset=lively,min_p=0.05,top_h=0.4:top_h_pool=50

    Perplexity needs a folder exported with --with-logits, and mass one exported with --with-mass.
    """
    if values["system"] is not None and not values["chat"]:
        raise click.UsageError("--system needs --chat.")
    require_folder_first(folder, [str(prompts)])
    install.require("`topw compare`", "compare")
    # Import late, for fast --help and usage errors.
    from topw_deploy.cli.progress import progress
    from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
    from topw_lab.compare.comparison import CompareRequest, compare, summarise

    check_output(json_file, "json_file")
    check_output(html_file, "html_file")
    request = CompareRequest(
        folder=folder,
        rules=read_rules(values["rules"]),
        temperatures=read_temperatures(values["temperatures"]),
        prompts=_read_prompts(prompts, values["chat"], values["system"])[: values["limit"]],
        samples=values["samples"],
        max_new_tokens=values["max_new_tokens"],
        seed=values["seed"],
        ignore_eos=values["ignore_eos"],
        rows=values["batch_size"],
        opening=take_opening(values),
    )
    comparison = compare(request, progress(values["quiet"]))
    _write_report(comparison, summarise(comparison), json_file, html_file)


def _read_prompts(path: Path, chat: bool, system: str | None) -> list[Prompt]:
    """The prompts of a file. chat, system: as in `read_prompt_lines`."""
    from topw_lab.compare.comparison import Prompt

    data, where = read_source(path)
    if path.suffix.lower() in _JSON_LINES:
        lines = read_prompt_lines(data, where, {}, chat=chat, system=system)
    else:
        lines = read_text_lines(data, where, chat=chat, system=system)
    return [Prompt(line.kind, line.prompt, line.where, line.parameters) for line in lines]


def _write_report(
    comparison: Comparison, summaries: list[RuleSummary], json_file: Path | None, html_file: Path | None
) -> None:
    """Print the table before files are written, so that the table is not lost if the disk is full."""
    from topw_lab.compare.comparison import as_dict, report_lines
    from topw_lab.compare.page import page

    if str(json_file) != "-":
        say(*report_lines(comparison, summaries))
    if html_file is not None:
        write_text(page(comparison, summaries), html_file)
    if str(json_file) == "-":
        say_json(as_dict(comparison, summaries), indent=2)
    elif json_file is not None:
        write_json(as_dict(comparison, summaries), json_file)
