"""`topw lm-eval`: run lm-evaluation-harness on an exported folder."""

from __future__ import annotations

import click

from topw_deploy.cli.options import CONTEXT

_PASS_ARGUMENTS = {**CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(name="lm-eval", context_settings=_PASS_ARGUMENTS)
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness on an exported model: `lm_eval ARGUMENT...` with the model class topw_deploy.

    \b
    topw lm-eval --model_args path=OUT,temperature=1.5 --tasks gsm8k_cot

    The default is --model topw_deploy. See docs/guide/evaluation.md for --model_args, and `topw lm-eval run --help` for
    the harness's own options.
    """
    from topw_lab.harness import run

    run(arguments)
