"""`topw triton OUT REPOSITORY`: add an exported model to a model repository of Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from topw_deploy.cli.options import CONTEXT, opening_options, take_opening
from topw_deploy.cli.terminal import say


@click.command(name="triton", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("repository", metavar="REPOSITORY", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the model in Triton.  [default: the folder's name]")
@click.option(
    "--max-batch",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Maximum number of sequences that run at once.",
)
@click.option(
    "--max-queue", type=click.IntRange(0), default=256, show_default=True, help="Maximum number of sequences that wait."
)
@click.option(
    "--max-length",
    type=click.IntRange(1),
    help="Maximum tokens of a sequence, including its prompt.  [default: the model's context]",
)
@opening_options
@click.option("--hard-link", is_flag=True, help="Hard-link the export's files instead of copying them.")
def command(
    folder: Path,
    repository: Path,
    name: str | None,
    max_batch: int,
    max_queue: int,
    max_length: int | None,
    hard_link: bool,
    **options: Any,
) -> None:
    """Add the exported model in the folder OUT to a model REPOSITORY of NVIDIA's Triton Inference Server.

    The model runs in an engine in Triton's Python backend and streams its text. See docs/guide/scale.md.
    """
    from topw_deploy.triton.repository import write_repository

    engine = {"max_batch": max_batch, "max_queue": max_queue, "max_length": max_length}
    written = write_repository(
        folder,
        repository,
        name=name,
        engine={key: value for key, value in engine.items() if value is not None},
        opening={key: value for key, value in take_opening(options).items() if value is not None},
        hard_link=hard_link,
    )
    say(str(written))
