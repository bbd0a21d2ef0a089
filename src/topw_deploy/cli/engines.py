"""`topw build-engine OUT`: build a TensorRT engine of an export."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from topw_deploy.cli.options import CONTEXT, quiet_option
from topw_deploy.cli.terminal import click_bar, print_phase, progress, rewrite_line, say, say_json, tell
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.text import binary_size, decimal_size

if TYPE_CHECKING:
    from topw_deploy.plugins.nvcc import CompilationState


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
def build_engine(out: Path, as_json: bool, quiet: bool, **values: Any) -> None:
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


@click.group(name="plugins", context_settings=CONTEXT)
def plugins() -> None:
    """Build the native libraries for NVIDIA GPUs, and show the installed ones."""


class _Architectures(click.ParamType):
    """A type of option: GPU architectures as 87, sm_87, 8.7 or native, separated by commas."""

    name = "architectures"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from topw_deploy.errors import ParameterError
        from topw_deploy.plugins import library

        if isinstance(value, tuple):
            return value
        try:
            return library.parse_architectures(str(value))
        except ParameterError as error:
            self.fail(str(error), param, ctx)


@plugins.command(name="build")
@click.option(
    "--cuda",
    is_flag=True,
    required=True,
    help="Build the library of CUDA kernels: onnxruntime's operator for GPUs, and TensorRT's plugin.",
)
@click.option(
    "--architecture",
    "--arch",
    type=_Architectures(),
    multiple=True,
    metavar="LIST",
    help="Build only for these GPUs: sm_87, 87, 8.7, or native for this machine's; comma-separated or repeated.  "
    "[default: sm_75 to sm_121]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Where to write the library.  [default: where this package looks for it]",
)
@quiet_option
def build(
    cuda: bool,
    architecture: tuple[tuple[str, ...], ...],
    output: Path | None,
    quiet: bool,
) -> None:
    """Compile a library on this machine, which does not need the GPUs.

    Needs nvcc (CUDA_HOME, PATH, pip's packages, /usr/local/cuda) and a C++ compiler, and takes some minutes for all
    architectures. If --output is outside the package, TOPW_CUDA_LIBRARY must name the library. For trtexec and C++
    hosts, give the library to --dynamicPlugins or IPluginRegistry::loadLibrary.
    """
    from topw_deploy.plugins import library
    from topw_deploy.plugins.nvcc import compile_cuda

    architectures = library.resolve_architectures([name for names in architecture for name in names])
    say_progress = progress(quiet).say
    with _shown_progress(quiet) as watch:
        built = compile_cuda(output, architectures, say=say_progress, watch=watch)
    names = " ".join(f"sm_{number}" for number in built.architectures)
    say_progress(f"{decimal_size(built.size)} for {names} in {built.seconds:.0f} s")
    say(built.path)


@contextlib.contextmanager
def _shown_progress(quiet: bool) -> Iterator[Callable[[CompilationState], object]]:
    """Yield a function that shows progress: on a line that is rewritten on terminals, or in a line per architecture."""
    if quiet:
        yield lambda _state: None
    elif sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # wrapped lines cannot be rewritten
        yield lambda state: rewrite_line(_progress_line(state)[:width])
        rewrite_line("")
    else:
        yield _LinePrinter()


def _progress_line(state: CompilationState) -> str:
    now = " ".join(f"sm_{number}" for number in state.running)
    what = f"compiling {now}" if now else "linking" if len(state.done) == state.total else "reading the sources"
    return f"{len(state.done)} of {state.total} done, {state.seconds:.0f} s, {what}"


class _LinePrinter:
    """Prints a line for each architecture that is done."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, state: CompilationState) -> None:
        for number in state.done[self._printed :]:
            self._printed += 1
            print_phase(f"sm_{number} done, {self._printed} of {state.total}, {state.seconds:.0f} s")


@plugins.command(name="show")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def show(as_json: bool) -> None:
    """Show the installed libraries, what they support, and the GPUs of this machine."""
    from topw_deploy.plugins import library

    installed = library.read_status()
    if as_json:
        say_json(asdict(installed), indent=2)
    else:
        say(*library.status_lines(installed))
