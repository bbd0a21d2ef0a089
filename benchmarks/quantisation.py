"""The cost of rounding to 4 and 8 bits: weight errors, perplexity, memory. Figures: docs/guide/quantisation.md.

    python -m benchmarks.quantisation [--part errors perplexity memory] [--model DIR] [--every 1] [--folder OUT ...]

errors: root mean square error of normal weights, relative to their deviation.
perplexity: the bundled model (or --model, with its tokenizer) on its held-out text with rounded matrices, the rest in
    float32, with the standard error of the difference; --every 10 takes every tenth row of 512 tokens.
memory: resident memory of opening a session over each --folder, in a fresh process with one thread.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import table
from benchmarks.int4 import HEADER, comparison_row, held_out_rows, torch_losses, torch_model
from topw_deploy.export.quantise import Quantisation
from topw_deploy.export.verification.dequantised import round_to_blocks
from topw_deploy.tiny import tiny_model_path

_ERRORS: dict[str, dict[str, Any]] = {
    "int4 search": {"bits": 4},
    "int4 search symmetric": {"bits": 4, "symmetric": True},
    "int8 search": {"bits": 8},
}
_VARIANTS: dict[str, dict[str, Any]] = {
    f"{name}, blocks of {size}{f', table {bits}' if settings['bits'] == 4 else ''}": {
        **settings, "block_size": size, "table_bits": bits
    }
    for name, settings in _ERRORS.items()
    for size in (32, 64, 128, 256)
    for bits in ((8, 4) if settings["bits"] == 4 else (8,))
}  # fmt: skip
# argv: a graph, and the native library or "". Other imports could free memory that the session would then reuse.
_OPEN = """
import os, sys, onnxruntime
def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 3
if sys.argv[2]:
    options.register_custom_ops_library(sys.argv[2])
before = resident()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(resident() - before)
"""


def error_table() -> str:
    """A row per block size, a column per scheme."""
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32))
    rows = []
    for size in (16, 32, 64, 128, 256):
        cells = []
        for settings in _ERRORS.values():
            lost = round_to_blocks(weights, size, Quantisation(**settings, block_size=size)) - weights.numpy()
            cells.append(f"{np.sqrt(np.mean(lost**2)):.2%}")
        rows.append((size, *cells))
    return table(("block", *_ERRORS), rows)


def perplexity_table(folder: Path, every: int) -> str:
    """A table of perplexities with and without rounded weights."""
    rows = held_out_rows(folder)[::every]
    model = torch_model(folder)
    exact = torch_losses(model, rows)
    found = [comparison_row("float32", exact, exact, rows, 0)]
    for name, given in _VARIANTS.items():
        found.append(
            comparison_row(name, torch_losses(_round_model(model, Quantisation(**given)), rows), exact, rows, 0)
        )
    return table(HEADER[:-1], [line[:-1] for line in found])


def _round_model(model: Any, quantisation: Quantisation) -> Any:
    changed = copy.deepcopy(model)
    ends = [changed.get_input_embeddings().weight, changed.get_output_embeddings().weight]
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.dim() != 2:
                continue
            size = quantisation.table_block_size(weight.shape[1]) if weight is ends[0] else quantisation.block_size
            how = quantisation.table_scheme if any(weight is end for end in ends) else quantisation
            if size is not None:
                weight.copy_(torch.from_numpy(round_to_blocks(weight, size, how)))
    return changed


def memory_table(folders: list[Path]) -> str:
    """File and resident bytes of each folder's model.onnx."""
    from topw_deploy.plugins.library import library_path

    rows = []
    for folder in folders:
        ours = (folder / "topw_manifest.json").is_file()
        command = [sys.executable, "-c", _OPEN, str(folder / "model.onnx"), str(library_path() or "") if ours else ""]
        added = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        size = sum(path.stat().st_size for path in folder.glob("model*onnx*"))
        rows.append((folder.name, f"{size / 1e6:.0f} MB", f"{added / 1e6:.0f} MB"))
    return table(("folder", "file", "memory"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", nargs="+", default=["errors", "perplexity"], choices=("errors", "perplexity", "memory")
    )
    parser.add_argument("--model", type=Path, default=tiny_model_path())
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--folder", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if "errors" in given.part:
        print(f"\n{error_table()}\n", flush=True)
    if "perplexity" in given.part:
        print(f"\n{perplexity_table(given.model, given.every)}\n", flush=True)
    if "memory" in given.part or given.folder:
        print(f"\n{memory_table(given.folder)}\n")


if __name__ == "__main__":
    main()
