"""The component `folders`: the bundled model exported for GPUs, with the CPU's tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import tokens
from benchmarks.gpu.packing.component import Packed
from topw_deploy import __version__
from topw_deploy.errors import BenchmarkError, TopWError

FORMS = {
    "float32-standard": ("--target", "tensorrt", "--max-length", "512"),
    "float16-gqa": ("--dtype", "fp16"),
    "int4-gqa": ("--dtype", "int4", "--compute-dtype", "fp16"),
    "float16-standard": ("--dtype", "fp16", "--target", "tensorrt", "--max-length", "512"),
}
"""Folder -> options of `topw export tiny`. float32 uses standard operators, as GroupQueryAttention on CUDA takes half
precision only."""


def stage(
    tree: Path, names: Sequence[str], *, verify: bool = True, seeds: int = 3, new_tokens: int = tokens.TOKENS
) -> Packed:
    """Export the named forms into `tree` and record the CPU's tokens of each.

    verify: verify the exports.
    seeds, new_tokens: of the recorded requests.

    Raises BenchmarkError with the exporter's message.
    """
    tree.mkdir(parents=True)
    for name in names:
        _export(tree / name, [*FORMS[name], *([] if verify else ["--no-verify"])])
        try:
            tokens.record_tokens(tree / name, tokens.requests(seeds, new_tokens))
        except TopWError as error:
            raise BenchmarkError(f"the packed folder {name} does not run on this CPU: {error}") from None
    return Packed(f"topw-deploy {__version__}", notes=() if verify else ("These exports were not verified.",))


def _export(folder: Path, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "topw_deploy", "export", "tiny", str(folder), *options, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchmarkError(f"topw export tiny {' '.join(options)} failed: {words[-1][:500]}")
