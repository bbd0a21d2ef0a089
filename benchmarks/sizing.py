"""How much memory and how many replicas a load needs, by formula. The formulas: docs/guide/scale.md.

    python -m benchmarks.sizing OUT [--rows 8] [--length TOKENS] [--chunk 256] [--measure]
    python -m benchmarks.sizing OUT --costs FILE --rate 100 --prompt 300 --new 60 [--load 0.7]

--measure fills every row of an engine and compares the process's peak with the formula. --costs is what
`python -m benchmarks.fleet --measure OUT` wrote.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.costs import MODEL_OPTIONS, Costs
from topw_deploy.manifest import DecoderManifest, load_manifest
from topw_deploy.progress import peak_bytes
from topw_deploy.text import binary_size

PROCESS = 120 << 20
"""Python, its libraries and the HTTP server, in bytes. An engine alone took 90 MiB."""

_TOKENIZER = 16  # bytes per byte of tokenizer.json; took 8 to 14
_ACTIVATIONS = 16  # float32 values per token of a chunk and per input or output of the widest product; took 8 to 14
_LOOKUPS = {"Gather", "GatherBlockQuantized"}
_PRODUCTS = {"MatMul", "Gemm", "MatMulNBits", "MoE", "QMoE"}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a process, estimated high.

    process: Python, its libraries and the tokenizer.
    weights: the model's files.
    tied: the token table if it is also the output head, of which onnxruntime packs a copy for the product.
    row: states of one sequence of the full length. rows: number of rows.
    work: activations of a chunk, and the logits of all rows.
    """

    process: int
    weights: int
    tied: int
    row: int
    rows: int
    work: int

    @property
    def total(self) -> int:
        return self.process + self.weights + self.tied + self.rows * self.row + self.work

    def __str__(self) -> str:
        parts = {
            "process": self.process,
            "weights": self.weights,
            "tied table": self.tied,
            f"{self.rows} rows": self.rows * self.row,
            "chunk": self.work,
        }
        listed = ", ".join(f"{name} {binary_size(size)}" for name, size in parts.items())
        return f"{listed}: {binary_size(self.total)} in all"


def estimate_memory(folder: Path, rows: int, length: int | None, chunk: int = 256) -> MemoryEstimate:
    """From the manifest, the graph and the files.

    length: tokens of a sequence; None for the context. chunk: the engine's prefill_budget.
    """
    manifest = load_manifest(folder)
    if not isinstance(manifest, DecoderManifest):
        raise SystemExit(f"{folder} has no decoder")
    tokens = min(length or manifest.decoder.context_length, manifest.decoder.context_length)
    row = sum(state.row_bytes(tokens) for state in manifest.decoder.states)
    weights = sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith("model.onnx"))
    vocab = manifest.sampler.vocab_size
    tied, width = _graph_sizes(folder, vocab)
    tokenizer = folder / "tokenizer.json"
    process = PROCESS + (_TOKENIZER * tokenizer.stat().st_size if tokenizer.is_file() else 0)
    return MemoryEstimate(process, weights, tied, row, rows, 4 * (chunk * _ACTIVATIONS * width + rows * vocab))


def _graph_sizes(folder: Path, vocab: int) -> tuple[int, int]:
    """Bytes of a tied table, and inputs plus outputs of the widest product but the output head."""
    import onnx_ir as ir

    graph = ir.load(folder / "model.onnx").graph
    tied, width = 0, 0
    for value in graph.initializers.values():
        tensor, readers = value.const_value, {node.op_type for node in value.consumers()}
        if tensor is not None and readers & _LOOKUPS and readers - _LOOKUPS - {"TopWSample"}:
            tied = max(tied, tensor.nbytes)
    for node in graph:
        if node.op_type not in _PRODUCTS:
            continue
        if node.op_type == "MatMulNBits":
            shapes = [(node.attributes["K"].as_int(), node.attributes["N"].as_int())]
        else:
            constants = [value.const_value for value in node.inputs if value is not None]
            shapes = [tuple(tensor.shape.numpy()) for tensor in constants if tensor is not None]
        width = max([width, *(sum(shape[-2:]) for shape in shapes if len(shape) > 1 and vocab not in shape)])
    return tied, width


def needed_replicas(rate: float, seconds: float, load: float) -> int:
    """Replicas for `rate` requests per second of `seconds` each (`Costs.request`), used to the share `load`."""
    return math.ceil(rate * seconds / load)


def measured_memory(folder: Path, rows: int, length: int | None, chunk: int) -> int:
    """Peak resident bytes of this process with every row in use. Other imports before the call would count."""
    from topw_deploy.engine import Engine
    from topw_deploy.runtime import TopWModel

    with TopWModel.from_pretrained(folder, **MODEL_OPTIONS) as model:
        most = min(length or model.manifest.decoder.context_length, model.manifest.decoder.context_length)
        with Engine(model, max_batch=rows, max_length=most, prefill_budget=chunk, reuse_prefixes=False) as engine:
            prompts = [[3 + row] * (most - 16) for row in range(rows)]
            asked = [engine.submit(prompt, max_new_tokens=16, ignore_eos=True) for prompt in prompts]
            for each in asked:
                each.result()
    return peak_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int)
    parser.add_argument("--chunk", type=int, default=256, help="the engine's prefill_budget")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--prompt", type=int, default=300, help="tokens that are read")
    parser.add_argument("--new", type=int, default=60, help="tokens that are drawn")
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity that is used")
    args = parser.parse_args()
    given = args.folder, args.rows, args.length, args.chunk
    peak = measured_memory(*given) if args.measure else None
    found = estimate_memory(*given)
    print(found)
    if peak is not None:
        print(f"measured {binary_size(peak)}, {peak / found.total:.2f} of this")
    if args.costs is not None:
        seconds = Costs.load(args.costs).request(args.prompt, args.new)
        print(f"a request takes {seconds * 1e3:.3g} ms of a replica: at most {1 / seconds:.3g} per second")
        if args.rate is not None:
            needed = needed_replicas(args.rate, seconds, args.load)
            print(f"{args.rate:g} per second at load {args.load:g} need {needed} replicas")


if __name__ == "__main__":
    main()
