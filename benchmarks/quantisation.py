"""What rounding to 4 and 8 bits costs: errors of weights, perplexity of the bundled model, memory of a session.

    python -m benchmarks.quantisation [--part errors perplexity memory] [--every 1] [--folder OUT ...]

errors: root mean square of what normally distributed weights lose, as a share of their deviation.
perplexity: the bundled model on its held-out text, every matrix rounded, everything else in float32; --every 10 takes
    every tenth document.
memory: of each exported --folder, or another exporter's, what opening a session with one thread adds to the resident
    memory of a fresh process.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import say, table
from topw_deploy.export.quantise import Quantisation
from topw_deploy.export.verification.dequantised import rounded

_ERRORS: dict[str, dict[str, Any]] = {
    "int4 default symmetric": {"bits": 4},
    "int4 default asymmetric": {"bits": 4, "symmetric": False},
    "int4 k_quant": {"bits": 4, "algorithm": "k_quant"},
    "int4 rtn symmetric": {"bits": 4, "algorithm": "rtn"},
    "int8 default symmetric": {"bits": 8},
}
_VARIANTS: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in _ERRORS.items() if name.startswith("int4")},
    **{f"int4 default, blocks of {size}": {"bits": 4, "block_size": size} for size in (16, 64, 128)},
    **{f"int8 default, blocks of {size}": {"bits": 8, "block_size": size} for size in (32, 128)},
}
# argv: a graph, and the native sampler's library or nothing. Nothing else is imported: it would be memory to reuse.
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


def errors() -> str:
    """Rows of blocks, columns of quantisers."""
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32))
    rows = []
    for size in (16, 32, 64, 128):
        cells = []
        for settings in _ERRORS.values():
            lost = rounded(weights, size, Quantisation(**settings, block_size=size)) - weights.numpy()
            cells.append(f"{np.sqrt(np.mean(lost**2)):.2%}")
        rows.append((size, *cells))
    return table(("block", *_ERRORS), rows)


def perplexity(every: int) -> str:
    """The bundled model's, and its ratio to that in float32."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from topw_deploy.demo import demo_model_path
    from topw_deploy.demo.corpus import gather_corpus
    from topw_deploy.demo.train import Recipe, held_out_loss

    folder = demo_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = gather_corpus().held_out[::every]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = held_out_loss(model, documents, tokenizer, Recipe()).loss
    rows = [("float32", f"{math.exp(before):.2f}", "1.000")]
    for name, given in _VARIANTS.items():
        say(name)
        loss = held_out_loss(_all_rounded(model, Quantisation(**given)), documents, tokenizer, Recipe()).loss
        rows.append((name, f"{math.exp(loss):.2f}", f"{math.exp(loss - before):.3f}"))
    return table(("weights", "perplexity", "ratio"), rows)


def _all_rounded(model: Any, settings: Quantisation) -> Any:
    changed = copy.deepcopy(model)
    embeddings = changed.get_input_embeddings().weight
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.dim() != 2:
                continue
            size = settings.table_block_size(weight.shape[1]) if weight is embeddings else settings.block_size
            if size is not None:
                weight.copy_(torch.from_numpy(rounded(weight, size, settings)))
    return changed


def memory(folders: list[Path]) -> str:
    """Bytes of files and of resident memory of each folder's model.onnx."""
    from topw_deploy.plugins.shared_library import library_path

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
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--folder", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if "errors" in given.part:
        print(f"\n{errors()}\n", flush=True)
    if "perplexity" in given.part:
        print(f"\n{perplexity(given.every)}\n", flush=True)
    if "memory" in given.part or given.folder:
        print(f"\n{memory(given.folder)}\n")


if __name__ == "__main__":
    main()
