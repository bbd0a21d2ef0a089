"""`topw triton OUT REPOSITORY`: add an exported model to a model repository of Triton."""

from __future__ import annotations

from pathlib import Path

import click

from topw_deploy.cli.options import CONTEXT
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
@click.option("--provider", default="auto", show_default=True, help="Execution provider: auto, cpu, cuda, ...")
@click.option("--threads", type=click.IntRange(min=0), help="Threads of one operator; 0 lets onnxruntime choose.")
@click.option("--hard-link", is_flag=True, help="Hard-link the export's files instead of copying them.")
def command(
    folder: Path,
    repository: Path,
    name: str | None,
    max_batch: int,
    max_queue: int,
    max_length: int | None,
    provider: str,
    threads: int | None,
    hard_link: bool,
) -> None:
    """Add the exported model in the folder OUT to a model REPOSITORY of NVIDIA's Triton Inference Server.

    The model runs in an engine in Triton's Python backend and streams its text. See docs/guide/scale.md.
    """
    from topw_deploy.triton.repository import write_repository

    engine = {"max_batch": max_batch, "max_queue": max_queue, "max_length": max_length}
    opening = {"provider": provider, "intra_op_num_threads": threads}
    written = write_repository(
        folder,
        repository,
        name=name,
        engine={key: value for key, value in engine.items() if value is not None},
        opening={key: value for key, value in opening.items() if value is not None},
        hard_link=hard_link,
    )
    say(str(written))
