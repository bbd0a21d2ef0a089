"""`topw build-engine MODEL` and `topw plugins`: TensorRT engines, and the native libraries for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from topw_deploy.cli.options import CONTEXT, COUNT, FILE, PATH, SIZE, Parsed, json_option, quiet_option
from topw_deploy.cli.terminal import progress, say, say_json, tell, waiting
from topw_deploy.plugins import library
from topw_deploy.text import decimal_size


@click.command(name="build-engine", context_settings=CONTEXT)
@click.argument("out", metavar="MODEL", type=PATH)
@click.option("--max-batch", type=COUNT, default=1, help="Maximum number of sequences per call.")
@click.option(
    "--max-sequence",
    type=COUNT,
    help="Maximum number of prompt tokens per sequence and run; longer prompts take several runs.  "
    "[default: 1024, or the cache's length]",
)
@click.option(
    "--max-edits",
    type=COUNT,
    help="Maximum number of tokens per sequence that penalties, biases and bans change.  [default: the cache's length]",
)
@click.option(
    "--profile",
    type=click.Choice(("both", "decode", "prefill")),
    default="both",
    help="What to tune for: prompts, the tokens after them, or both, with a profile each.",
)
@click.option(
    "--timing-cache", type=FILE, help="Read and write TensorRT's timings here, so that a second build is faster."
)
@click.option("--workspace", type=SIZE, help="Maximum scratch memory of the engine: 512MB, 2GB.  [default: free]")
@click.option(
    "--plugin",
    metavar="auto|none|PATH",
    default="auto",
    help="What samples: the plugin (of the CUDA library, or of the library PATH), or the function in the file.",
)
@json_option
@quiet_option
def build_engine(out: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Build a TensorRT engine of MODEL into MODEL/engines, on the machine that will run it.

    MODEL must be exported with --target tensorrt. An engine fits one GPU model and one TensorRT version, stated by the
    stamp beside it. Run it with --provider tensorrt.
    """
    # Import late, for fast --help and usage errors.
    from msgspec import to_builtins

    from topw_deploy.tensorrt.build import build_engine

    with waiting("Building"):
        built = build_engine(out, progress=progress(quiet), **values)
    if as_json:
        say_json({"path": str(built.path), **to_builtins(built.stamp)}, indent=2)
    else:
        if not quiet:
            tell(f"{decimal_size(built.stamp.size)} in {built.seconds:.0f} s")
        say(built.path)


@click.group(name="plugins", context_settings=CONTEXT)
def plugins() -> None:
    """Build the native libraries for NVIDIA GPUs; `topw doctor` shows the installed ones."""


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
    type=Parsed("architectures", library.parse_architectures),
    multiple=True,
    metavar="LIST",
    help="Build only for these GPUs: sm_87, 87, 8.7, or native for this machine's; comma-separated or repeated.  "
    "[default: sm_75 to sm_121]",
)
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    help="Where to write the library.  [default: where this package looks for it]",
)
@quiet_option
def build(cuda: bool, architecture: tuple[tuple[str, ...], ...], output: Path | None, quiet: bool) -> None:
    """Compile a library on this machine, which does not need the GPUs.

    Needs nvcc (CUDA_HOME, PATH, pip's packages, /usr/local/cuda) and a C++ compiler, and takes some minutes for all
    architectures. If --output is outside the package, TOPW_CUDA_LIBRARY must name the library. For trtexec and C++
    hosts, give the library to --dynamicPlugins or IPluginRegistry::loadLibrary.
    """
    from topw_deploy.plugins.nvcc import compile_cuda

    architectures = library.resolve_architectures([name for names in architecture for name in names])
    say_progress = progress(quiet).say
    with waiting("Compiling"):
        built = compile_cuda(output, architectures, say=say_progress)
    names = " ".join(f"sm_{number}" for number in built.architectures)
    say_progress(f"{decimal_size(built.size)} for {names} in {built.seconds:.0f} s")
    say(built.path)
