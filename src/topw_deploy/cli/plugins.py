"""`topw plugins`: build the libraries for NVIDIA GPUs, and show which there are."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.sizes import decimal_size


@click.group(name="plugins", context_settings=CONTEXT)
def command() -> None:
    """The native libraries: build those for NVIDIA GPUs, and show what is there."""


class _Architectures(click.ParamType):
    """87, sm_87 or 8.7, several with commas between them."""

    name = "architectures"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found = []
        for word in str(value).replace(",", " ").split():
            number = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d)", word)
            if number is None:
                self.fail(f"{word!r} is no architecture such as 87, sm_87 or 8.7.", param, ctx)
            found.append(int(number[1] or number[2] + number[3]))
        if not found:
            self.fail("it is empty, but must name architectures such as 87.", param, ctx)
        return tuple(found)


@command.command(name="build")
@click.option("--cuda", is_flag=True, help="The library with the CUDA kernels: onnxruntime's operator for GPUs.")
@click.option(
    "--tensorrt-root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=None,
    metavar="DIR",
    help="TensorRT's plugin for C++ hosts and trtexec, against the headers in DIR (/usr for system packages).",
)
@click.option(
    "--arch",
    type=_Architectures(),
    default=(),
    metavar="LIST",
    help="Only for these GPUs: 87, sm_87 or 8.7, with commas.  [default: sm_75 to sm_121]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Where to write it.  [default: where this package looks for it]",
)
def build(cuda: bool, tensorrt_root: Path | None, arch: tuple[int, ...], output: Path | None) -> None:
    """Compile a library on this machine, for GPUs that need not be there.

    It takes nvcc (CUDA_HOME, PATH, pip's packages, /usr/local/cuda) and a C++ compiler. What --cuda writes elsewhere
    than into the package is used where TOPW_CUDA_LIBRARY names it; the plugin in Python uses that library too. What
    --tensorrt-root writes is for `build-engine --plugin`, trtexec --dynamicPlugins and hosts in C++.
    """
    if cuda == (tensorrt_root is not None):
        raise click.UsageError("say what to build: either --cuda or --tensorrt-root DIR.")
    if tensorrt_root is None:
        _build_cuda(output, arch)
    else:
        _build_tensorrt(tensorrt_root, output, arch)


def _build_cuda(output: Path | None, architectures: tuple[int, ...]) -> None:
    from topw_deploy.plugins import cuda_build

    made = cuda_build.build(output, architectures, tell=tell)
    tell(f"{decimal_size(made.size)} in {made.seconds:.0f} s")
    say(made.path)


def _build_tensorrt(root: Path, output: Path | None, architectures: tuple[int, ...]) -> None:
    from topw_deploy.plugins.tensorrt import build as plugin_build

    made = plugin_build.build(root, output, architectures, tell=tell)
    tell(f"{decimal_size(made.size)} in {made.seconds:.0f} s")
    say(made.path)


@command.command(name="show")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def show(as_json: bool) -> None:
    """Show the libraries that are there, what they are for, and the GPUs of this machine."""
    from topw_deploy.plugins import report

    found = report.look()
    if as_json:
        say_json(asdict(found), indent=2)
    else:
        say(*report.lines(found))
