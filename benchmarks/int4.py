"""The frontier of perplexity against bits and step time of 4-bit exports. Figures: docs/lab/results.md.

    python -m benchmarks.int4 --model HF_FOLDER [--llama-python PYTHON] [--part accuracy speed] [--work DIR]
        [--export NAME=FOLDER ...] [--llama Q4_0 Q4_K_M ...] [--threads 1 2] [--rows N]

HF_FOLDER is a Llama. Without --export, each of CANDIDATES is exported once. PYTHON needs llama-cpp-python and gguf;
without it llama.cpp is left out.

accuracy: loss over N rows of 512 tokens of Python's docstrings (the bundled model's held-out text), against float32 in
    torch, with the standard error over rows; bits a weight of the products, with scales and zero points.
speed: greedy steps after --prompt tokens; the models take turns in random order.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import UNCOUNTED, add_repository_to_pythonpath, machine, say, table
from benchmarks.loops import HEADER, cells, measure_loops, open_graphs
from benchmarks.models import export_once
from topw_lab.worker import Worker

HERE = Path(__file__)
CANDIDATES: dict[str, tuple[str, ...]] = {
    "int4": ("--dtype", "int4"),
    **{f"at most {bits} bits": ("--dtype", "int4", "--average-bits", bits) for bits in ("4.1", "5", "6", "7")},
    "blocks of 32": ("--dtype", "int4", "--block-size", "32"),
    "table and head in 4 bits": ("--dtype", "int4", "--table-bits", "4"),
    "rounded to nearest": ("--dtype", "int4", "--calibration", "none"),
    "int8": ("--dtype", "int8"),
}
COLUMNS = 512
_BATCH = 16


def held_out_rows(folder: Path, most: int) -> np.ndarray:
    """int64 [at most `most` rows, COLUMNS + 1] of the held-out documents, each behind token 0, evenly spread."""
    from tokenizers import Tokenizer

    from benchmarks.corpus import gather_corpus

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = tokenizer.encode_batch(list(gather_corpus().held_out), add_special_tokens=False)
    stream = np.concatenate([np.array([0, *document.ids]) for document in documents])
    count = (len(stream) - 1) // COLUMNS
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))
    return np.stack([stream[row * COLUMNS : (row + 1) * COLUMNS + 1] for row in chosen])


def torch_model(folder: Path) -> Any:
    """The float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def torch_losses(model: Any, rows: np.ndarray) -> np.ndarray:
    """A torch model's losses [rows, COLUMNS]."""
    import torch

    found = []
    with torch.no_grad():
        for row in torch.from_numpy(rows):
            logits = model(input_ids=row[None, :-1]).logits[0].float()
            found.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none").numpy())
    return np.stack(found)


def graph_losses(folder: Path, rows: np.ndarray) -> np.ndarray:
    """Run the exported graph token by token. Returns its losses [rows, COLUMNS]."""
    from topw_deploy.export.verification.reference import decoder_driver
    from topw_deploy.manifest import load_decoder_manifest

    probe, found = decoder_driver(folder, load_decoder_manifest(folder).decoder), np.empty((len(rows), COLUMNS))
    for start in range(0, len(rows), _BATCH):
        part = rows[start : start + _BATCH]
        probe.start(len(part))
        for column in range(COLUMNS):
            logits = probe.step(part[:, column : column + 1], np.ones((len(part), column + 1), np.int64)).astype(float)
            most = logits.max(axis=1)
            chosen = logits[np.arange(len(part)), part[:, column + 1]]
            found[start : start + len(part), column] = (
                np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most - chosen
            )
    return found


ACCURACY = ("weights", "bits", "perplexity", "nats over float32", "standard error", "ratio", "file MB")


def product_bits(folder: Path) -> str:
    """Average bits of the weights of an export's products, without table and head."""
    import onnx_ir as ir

    from topw_deploy.export.verification.dequantise import average_bits, coded_matrices
    from topw_deploy.manifest import MODEL_NAME, load_decoder_manifest

    vocabulary = load_decoder_manifest(folder).sampler.vocab_size
    coded = coded_matrices(ir.load(folder / MODEL_NAME).graph)
    return f"{average_bits([one for one in coded if one.scales.shape[1] < vocabulary]):.2f}"


def comparison_row(
    name: str, losses: np.ndarray, exact: np.ndarray, rows: np.ndarray, size: int, bits: str = ""
) -> tuple[str, ...]:
    """A row of the accuracy table. Token 0, which starts each document, does not count.

    losses, exact: losses [rows, COLUMNS] of this model and of the float32 model.
    size: bytes of the weights' files.
    """
    counted = rows[:, 1:] != 0
    tokens = counted.sum(axis=1)
    lost = ((losses - exact) * counted).sum(axis=1)
    ratio = lost.sum() / tokens.sum()
    rest = lost - ratio * tokens
    error = math.sqrt((rest**2).sum() * len(rest) / (len(rest) - 1)) / tokens.sum()
    perplexity = math.exp((losses * counted).sum() / tokens.sum())
    numbers = (f"{perplexity:.2f}", f"{ratio:.4f}", f"{error:.4f}", f"{math.exp(ratio):.4f}", f"{size / 1e6:.1f}")
    cells = (name, bits, *numbers)
    say("  ".join(cells))
    return cells


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model.onnx*"))


def llama_files(worker: Worker, model: Path, kinds: list[str], work: Path) -> dict[str, Path]:
    """Write the checkpoint's GGUF files that do not exist yet. Returns the file of each kind."""
    files = {kind: work / f"{model.name}-{kind}.gguf" for kind in ("F32", *kinds)}
    if not files["F32"].exists():
        write_float32_gguf(worker, model, files["F32"])
    for kind, file in files.items():
        if not file.exists():
            worker.call("quantise", source=str(files["F32"].absolute()), kind=kind, target=str(file.absolute()))
    return files


def write_float32_gguf(worker: Worker, model: Path, target: Path, *, texts: bool = False) -> None:
    """Write the checkpoint as a GGUF file in float32.

    texts: include the vocabulary, so that llama.cpp can read and write texts.
    """
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = {}
    for shard in sorted(model.glob("*.safetensors")):
        tensors |= load_file(shard)
    config = json.loads((model / "config.json").read_text())
    vocabulary = {"tokenizer": json.loads((model / "tokenizer.json").read_text())} if texts else {}
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        weights = Path(scratch) / "weights.npz"
        np.savez(weights, **tensors)
        worker.call("write", weights=str(weights), config=config, target=str(target.absolute()), **vocabulary)


@contextmanager
def llama_worker(args: argparse.Namespace, threads: int) -> Iterator[Worker | None]:
    if args.llama_python is None:
        yield None
        return
    settings = {"threads": threads}
    side = HERE.with_name("llama_cpp_worker.py")
    with Worker("llama.cpp", side, settings, python=args.llama_python, threads=threads) as worker:
        yield worker


def accuracy_table(args: argparse.Namespace, exports: dict[str, Path]) -> str:
    rows = held_out_rows(args.model, args.rows)
    say(f"{rows[:, 1:].size} tokens in {len(rows)} rows")
    exact = torch_losses(torch_model(args.model), rows)
    found = [comparison_row("float32", exact, exact, rows, 0)]
    found += [
        comparison_row(name, graph_losses(path, rows), exact, rows, weights_bytes(path), product_bits(path))
        for name, path in exports.items()
    ]
    with llama_worker(args, 2) as worker:
        if worker is not None:
            for kind, file in llama_files(worker, args.model, args.llama, args.work).items():
                worker.call("open", name=kind, path=str(file.absolute()), length=COLUMNS)
                losses = np.asarray(worker.call("losses", name=kind, rows=rows.tolist()))
                found.append(comparison_row(f"llama.cpp {kind}", losses, exact, rows, file.stat().st_size))
    return table(ACCURACY, found)


def speed_table(args: argparse.Namespace, exports: dict[str, Path], threads: int) -> str:
    """Milliseconds per step and prompt, by model."""
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompt = np.random.default_rng(0).integers(3, vocabulary, args.prompt).tolist()
    with open_graphs(exports, threads) as workers, llama_worker(args, threads) as llama:
        if llama is not None:
            files = llama_files(llama, args.model, args.llama, args.work)
            length = len(prompt) + args.turns * (args.steps + UNCOUNTED) + 1
            for kind in args.llama:
                llama.call("open", name=f"llama.cpp {kind}", path=str(files[kind].absolute()), length=length)
                workers[f"llama.cpp {kind}"] = llama
        prompts, steps = measure_loops(workers, prompt, prompts=3, turns=args.turns, steps=args.steps, seed=0)
    rows = [(name, *cells(prompts[name], steps[name])) for name in workers]
    return table((f"weights, {threads} threads", *HEADER), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--llama", nargs="+", default=["Q4_0", "Q4_1", "Q4_K_M", "Q8_0"], help="types of llama.cpp")
    parser.add_argument("--part", nargs="+", default=["accuracy", "speed"], choices=("accuracy", "speed"))
    parser.add_argument("--export", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--work", type=Path, default=Path(".cache/benchmarks"), help="where GGUF files are kept")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="counted steps per turn")
    args = parser.parse_args()
    add_repository_to_pythonpath()
    args.work.mkdir(parents=True, exist_ok=True)
    exports = {name: Path(folder) for name, _, folder in (one.partition("=") for one in args.export)}
    exports = exports or {name: export_once(args.model, *how) for name, how in CANDIDATES.items()}
    print(f"{machine()}; {args.model}")
    if args.llama_python is None:
        print("llama.cpp is left out: --llama-python is not given")
    if "accuracy" in args.part:
        print(f"\n{accuracy_table(args, exports)}", flush=True)
    if "speed" in args.part:
        for threads in args.threads:
            print(f"\n{speed_table(args, exports, threads)}", flush=True)


if __name__ == "__main__":
    main()
