"""Logits of other exporters' graphs against torch's: ragged batches, chunked prompts, sliding windows, capped scores.

    make peers && python -m benchmarks.peers_wrong

Graphs run unchanged in onnxruntime, with columns as in transformers; GroupQueryAttention's cache is one buffer for past
and present. Our export gets the same columns. Tables of docs/guide/import.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from benchmarks.common import machine, say, table
from topw_deploy.export import export_model
from topw_deploy.export.verification.reference import LogitsProbe
from topw_deploy.manifest import load_decoder_manifest

HEADS, DIM, CAPACITY, WINDOW = 2, 16, 64, 16  # of tests/peers/models.py; the buffer exceeds every sequence here
LONG, LENGTHS = 40, (40, 17, 5)  # tokens; each row decodes the last two one at a time
MAKERS = {
    "genai": "genai-{}",
    "mobius": "mobius-{}",
    "mobius `--ep cpu`": "mobius-cpu-{}",
    "optimum": "optimum-{}",
}
OURS = "this project"


@dataclass(frozen=True)
class Columns:
    """Token ids and mask [rows, columns], and the columns at which runs end."""

    ids: np.ndarray
    mask: np.ndarray
    ends: tuple[int, ...]


Step = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(ids [rows, n], mask [rows, past + n]) -> logits [rows, vocab] of each row's last token among the n."""


class Graph:
    """Another exporter's graph."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._in_place = b"GroupQueryAttention" in (folder / "model.onnx").read_bytes()

    def start(self, rows: int) -> None:
        shape = (rows, HEADS, CAPACITY if self._in_place else 0, DIM)
        self._past = {name: np.zeros(shape, np.float32) for name in self._inputs if name.startswith("past_key_values")}

    def step(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        binding = self._session.io_binding()
        for name in feeds.keys() & self._inputs.keys():
            binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        for name, value in self._past.items():
            bound = ort.OrtValue.ortvalue_from_numpy(value)
            binding.bind_ortvalue_input(name, bound)
            present = name.replace("past_key_values", "present")
            if self._in_place:
                binding.bind_ortvalue_output(present, bound)
            else:
                binding.bind_output(present)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        *presents, logits = (value.numpy() for value in binding.get_outputs())
        if not self._in_place:
            self._past = dict(zip(self._past, presents, strict=True))
        new = mask[:, -ids.shape[1] :]
        last = new.shape[1] - 1 - new[:, ::-1].argmax(axis=1)
        return logits[np.arange(len(ids)), last]


def padded_columns(lengths: tuple[int, ...], side: str, pieces: int = 1) -> Columns:
    """Prompts padded on `side`, in `pieces` chunks, then two single-token steps."""
    generator = np.random.default_rng(0)
    prompt = max(lengths) - 2
    ids, mask = np.zeros((len(lengths), prompt + 2), np.int64), np.zeros((len(lengths), prompt + 2), np.int64)
    for row, length in enumerate(lengths):
        start = prompt - (length - 2) if side == "left" else 0
        place = [*range(start, start + length - 2), prompt, prompt + 1]
        ids[row, place], mask[row, place] = generator.integers(3, 320, length), 1
    ends = [prompt * part // pieces for part in range(1, pieces + 1)]
    return Columns(ids, mask, (*ends, prompt + 1, prompt + 2))


def largest_difference(graph: Graph | LogitsProbe, reference: Any, fed: Columns) -> str:
    """The largest difference from torch's logits, or onnxruntime's error."""
    graph.start(len(fed.ids))
    worst, start = 0.0, 0
    for end in fed.ends:
        try:
            found = graph.step(fed.ids[:, start:end], fed.mask[:, :end])
        except Exception as error:  # noqa: BLE001  # onnxruntime raises a dozen unrelated classes
            return f"refused: {str(error).split('Status Message: ')[-1].strip()[:90]}"
        for row in range(len(fed.ids)):
            if fed.mask[row, start:end].any():
                wanted = reference(fed.ids[row, :end][fed.mask[row, :end] == 1])
                worst = max(worst, float(np.abs(found[row] - wanted).max()))
        start = end
    return f"{worst:.1e}" if worst < 1e-3 else f"**{worst:.2f}**"


def torch_reference(checkpoint: Path) -> Any:
    """ids [n] -> float32 logits [vocab] after the last id."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].numpy()

    return logits


BATCHES = {
    f"one sequence of {LONG}": padded_columns((LONG,), "left"),
    f"three rows of {LONG}": padded_columns((LONG,) * 3, "left"),
    f"three rows of {LONG}, the prompt in three pieces": padded_columns((LONG,) * 3, "left", 3),
    f"rows of {', '.join(map(str, LENGTHS))}, padded on the left": padded_columns(LENGTHS, "left"),
    f"rows of {', '.join(map(str, LENGTHS))}, padded on the right": padded_columns(LENGTHS, "right"),
}
SEQUENCES = {
    f"{WINDOW} tokens": padded_columns((WINDOW,), "left"),
    f"{LONG} tokens": padded_columns((LONG,), "left"),
    f"rows of {', '.join(map(str, LENGTHS))}, padded on the right": padded_columns(LENGTHS, "right"),
}
MODELS = {
    "mistral": "Mistral: a window of 16 in both layers",
    "gemma2": "Gemma 2: a window of 16 in one layer of two, scores capped at 2",
    "gemma3": "Gemma 3: a window of 16 in one layer of two",
}


def table_rows(model: str, fed: dict[str, Columns], root: Path, scratch: Path) -> list[list[str]]:
    """A row per entry of `fed`: name, then the differences of the peers' graphs and ours."""
    checkpoint = root / "checkpoints" / model
    reference = torch_reference(checkpoint)
    say(f"{model}: exporting")
    ours = scratch / model
    export_model(checkpoint, ours, verify=False)
    sides: list[Graph | LogitsProbe | None] = [
        Graph(folder) if (folder := root / "folders" / name.format(model)).is_dir() else None
        for name in MAKERS.values()
    ]
    sides.append(LogitsProbe(ours, load_decoder_manifest(ours).decoder))
    return [
        [name, *(largest_difference(side, reference, batch) if side is not None else "-" for side in sides)]
        for name, batch in fed.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="the folder that `make peers` wrote")
    root = parser.parse_args().peers
    header = ["fed", *MAKERS, OURS]
    with tempfile.TemporaryDirectory() as scratch:
        print(machine(), "\n")
        print(table(header, table_rows("llama-tied", BATCHES, root, Path(scratch))), "\n")
        for model, title in MODELS.items():
            print(f"{title}\n\n{table(header, table_rows(model, SEQUENCES, root, Path(scratch)))}\n")


if __name__ == "__main__":
    main()
