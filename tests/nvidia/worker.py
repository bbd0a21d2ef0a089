"""Runs NVIDIA's parser and builder, in the environment of make_environment.py.

Reads {"plugin": null | library path, "tasks": [task, ...]}.
A task is {"model": path, "batches": [[least, most], ...], "sequence": most tokens} or {"check": folder}.
Writes the results of `parse_and_build` or of `topw check`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import tensorrt_bindings as trt

EDITS = 8


class Logger(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(message)


def parse_and_build(task: dict[str, Any]) -> dict[str, Any]:
    """Parse a model, and build an engine for each range of batches. `bytes` are their sizes, 0 without an engine."""
    logger, started = Logger(), time.perf_counter()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    path = Path(task["model"])
    took = parser.parse(path.read_bytes(), str(path))
    layers = [network.get_layer(index).type for index in range(network.num_layers)]
    sizes = []
    words = mask_words(network, path) if took else 0
    for least, most in task["batches"] if took else ():
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            low, high = (shape(tensor, batch, task, words) for batch in (least, most))
            profile.set_shape(tensor.name, low[0], high[1], high[1])
        config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        sizes.append(0 if engine is None else engine.nbytes)
    return {
        "parsed": took,
        "layers": len(layers),
        "plugins": layers.count(trt.LayerType.PLUGIN_V3),
        "attention": layers.count(trt.LayerType.ATTENTION_INPUT),
        "cache_updates": layers.count(trt.LayerType.KV_CACHE_UPDATE),
        "bytes": sizes,
        "seconds": time.perf_counter() - started,
        "errors": logger.errors,
    }


def mask_words(network: Any, model: Path) -> int:
    """Words of a row's mask: from the logits of a sampler-only graph, or from the manifest beside a decoder."""
    inputs = (network.get_input(index) for index in range(network.num_inputs))
    widths = [tensor.shape[1] for tensor in inputs if tensor.name == "logits"]
    manifest = model.parent / "topw_manifest.json"
    vocab = widths[0] if widths else json.loads(manifest.read_text(encoding="utf-8"))["sampler"]["vocab_size"]
    return -(-int(vocab) // 32)


def shape(tensor: Any, batch: int, task: dict[str, Any], words: int) -> tuple[list[int], list[int]]:
    """(smallest, largest) shape of an input; a copied cache is as long as the call's tokens."""
    if tensor.name == "allowed":
        return [batch, words], [batch, words]
    least, most = 1, EDITS if tensor.name.startswith("edit_") else int(task.get("sequence", 1))
    if tensor.name == "attention_mask":
        least, most = 2 * least, 2 * most
    fixed = list(tensor.shape)[1:]
    return [batch, *(least if size < 0 else size for size in fixed)], [batch, *(most if s < 0 else s for s in fixed)]


def check_folder(folder: str) -> dict[str, Any]:
    from topw_deploy.tensorrt.check import check

    return dataclasses.asdict(check(Path(folder)))


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if asked["plugin"] is not None:
        assert trt.get_plugin_registry().load_library(asked["plugin"])
    answers = [check_folder(task["check"]) if "check" in task else parse_and_build(task) for task in asked["tasks"]]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
