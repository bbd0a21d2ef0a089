"""Time and memory of grafting the sampler onto another exporter's decoder of several GiB.

    python -m benchmarks.graft_memory [--gib 3] [--hidden 2048] [--vocab 32000] [--hard-link] [--folder DIR]

The decoder has random weights in one data file, whose mapped pages count as resident; the graft runs in its own
process, unverified. Figures: docs/guide/export.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor
from topw_deploy.tiny import tiny_model_path

_CHILD = """
import json, sys, time
from topw_deploy.export import export_model
from topw_deploy.progress import Progress
def peak():  # not getrusage, which starts with the parent's peak
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
started = time.perf_counter()
lines = []
export_model(
    *sys.argv[1:3],
    verify=False,
    hard_link=sys.argv[3] == "1",
    progress=Progress(lambda line: lines.append((round(time.perf_counter() - started, 2), line))),
)
print(json.dumps({"seconds": time.perf_counter() - started, "imports_mib": before / 1024, "peak_mib": peak() / 1024,
                  "phases": lines}))
"""


def write_decoder(folder: Path, gib: float, hidden: int, vocab: int) -> int:
    """Write a float32 decoder of `gib` GiB: an embedding, square layers, a head and one cached layer; returns bytes."""
    folder.mkdir(parents=True)
    layers = max(1, round((gib * 2**30 - 8 * vocab * hidden) / (4 * hidden * hidden)))
    offset, data = 0, (folder / "model.onnx.data").open("wb")
    generator = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="large")
    editor = GraphEditor(graph, "large")

    def weight(name: str, rows: int, columns: int) -> ir.Value:
        nonlocal offset
        for start in range(0, rows, 1024):
            count = min(1024, rows - start)
            data.write((0.02 * generator.standard_normal((count, columns), dtype=np.float32)).tobytes())
        length = 4 * rows * columns
        tensor = ir.ExternalTensor(
            "model.onnx.data",
            offset,
            length,
            ir.DataType.FLOAT,
            shape=ir.Shape([rows, columns]),
            name=name,
            base_dir=folder,
        )
        offset += length
        return editor.initializer(tensor, name)

    ids = editor.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    editor.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    state = editor.op("Gather", [weight("embedding", vocab, hidden), ids], axis=0)
    for layer in range(layers):
        state = editor.op("MatMul", [state, weight(f"layer.{layer}", hidden, hidden)])
    logits = editor.op("MatMul", [state, weight("head", hidden, vocab)], dtype=ir.DataType.FLOAT, name="logits")
    logits.shape = ir.Shape(["batch", "sequence", vocab])
    graph.outputs.append(logits)
    for kind in ("key", "value"):
        past = editor.input(f"past_key_values.0.{kind}", ir.DataType.FLOAT, ["batch", 1, "past", 2])
        present = editor.op("Identity", [past], dtype=ir.DataType.FLOAT, name=f"present.0.{kind}")
        present.shape = past.shape
        graph.outputs.append(present)
    data.close()
    ir.save(ir.Model(graph, ir_version=11), folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"model_type": "large", "max_position_embeddings": 4096}))
    shutil.copy(tiny_model_path() / "tokenizer.json", folder)
    return offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the decoder")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hard-link", action="store_true", help="share the data file instead of copying it")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (needs twice the size)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "decoder"
        started = time.perf_counter()
        size = write_decoder(source, arguments.gib, arguments.hidden, arguments.vocab)
        print(
            f"decoder: {size / 2**30:.2f} GiB in {len(ir.load(source / 'model.onnx').graph)} nodes, "
            f"made in {time.perf_counter() - started:.0f} s"
        )
        command = [sys.executable, "-c", _CHILD, str(source), str(Path(name) / "out"), str(int(arguments.hard_link))]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"graft: {result['seconds']:.1f} s, peak {result['peak_mib']:.0f} MiB "
            f"({result['imports_mib']:.0f} MiB after imports)"
        )
        for seconds, line in result["phases"]:
            print(f"  {seconds:6.2f} s  {line}")


if __name__ == "__main__":
    main()
