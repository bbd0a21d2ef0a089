"""`topw build-engine OUT`: build a TensorRT engine of an export."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from topw_deploy.cli.options import CONTEXT, quiet_option
from topw_deploy.cli.progress import click_bar, print_phase
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.text import binary_size


class _Size(click.ParamType):
    """A type of option: bytes, as a number or as 500MB, 2GB or 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from topw_deploy.errors import ParameterError
        from topw_deploy.text import parse_size

        try:
            return parse_size(value)
        except ParameterError as error:
            self.fail(str(error), param, ctx)


@click.command(name="build-engine", context_settings=CONTEXT)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Maximum number of sequences per call.",
)
@click.option(
    "--max-sequence",
    type=click.IntRange(min=1),
    default=None,
    help="Maximum number of prompt tokens per sequence and run; longer prompts take several runs.  "
    "[default: 1024, or the cache's length]",
)
@click.option(
    "--max-edits",
    type=click.IntRange(min=1),
    default=None,
    help="Maximum number of tokens per sequence that penalties, biases and bans change.  [default: the cache's length]",
)
@click.option(
    "--profile",
    type=click.Choice(("both", "decode", "prefill")),
    default="both",
    show_default=True,
    help="What to tune for: prompts, the tokens after them, or both, with a profile each.",
)
@click.option("--fp16", is_flag=True, help="Let TensorRT compute a float32 decoder in half precision (TensorRT 10).")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Read and write TensorRT's timings here, so that a second build is faster.",
)
@click.option(
    "--workspace",
    type=_Size(),
    default=None,
    help="Maximum scratch memory of the engine: 512MB, 2GiB.  [default: free]",
)
@click.option(
    "--plugin",
    metavar="auto|none|PATH",
    default="auto",
    show_default=True,
    help="What samples: the plugin (of the CUDA library, or of the library PATH), or the function in the file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the engine's stamp as JSON.")
@quiet_option
def command(out: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Build a TensorRT engine of OUT into OUT/engines, on the machine that will run it.

    OUT must be exported with --target tensorrt. An engine fits one GPU model and one TensorRT version, stated by the
    stamp beside it. Run it with --provider tensorrt.
    """
    # Import late, for fast --help and usage errors.
    from msgspec import to_builtins

    from topw_deploy.tensorrt.build import build_engine

    built = build_engine(out, progress=SILENT if quiet else Progress(print_phase, _building_bar), **values)
    if as_json:
        say_json({"path": str(built.path), **to_builtins(built.stamp)}, indent=2)
    else:
        if not quiet:
            tell(f"{binary_size(built.stamp.size)} in {built.seconds:.0f} s")
        say(built.path)


def _building_bar(total: int, _unit: str) -> AbstractContextManager[Advance]:
    return click_bar("building", total, show_eta=False)
