"""The worker of `benchmarks.loops`: decoders that end in ArgMax, of exports and of onnxruntime-genai's builder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from benchmarks.common import median_step_seconds, share_thread_pool
from topw_deploy.export.verification.reference import decoder_model, open_graph
from topw_deploy.manifest import DecoderInfo, State, load_decoder_manifest
from topw_deploy.plugins.library import library_path
from topw_deploy.runtime import TopWModel
from topw_lab.bench.decode import ArgMaxLoop


def bare_export(export: Path) -> tuple[ir.Model, DecoderInfo]:
    """An export with ArgMax instead of the sampler, and the description of its cache."""
    return decoder_model(export, argmax=True), load_decoder_manifest(export).decoder


def bare_peer(peer: Path) -> tuple[ir.Model, DecoderInfo]:
    """onnxruntime-genai's graph with ArgMax over the last logits."""
    model = ir.load(peer / "model.onnx")
    graph = model.graph
    info = peer_info(graph, json.loads((peer / "genai_config.json").read_text(encoding="utf-8"))["model"])
    logits = next(value for value in graph.outputs if value.name == "logits")
    last = ir.Value(name="bare.last", const_value=ir.tensor(-1, dtype=ir.DataType.INT64, name="bare.last"))
    graph.register_initializer(last)
    row = ir.node("Gather", [logits, last], attributes={"axis": 1})
    token = ir.node("ArgMax", [row.outputs[0]], attributes={"axis": 1, "keepdims": 0})
    graph.extend([row, token])
    token.outputs[0].name = "next_token"
    token.outputs[0].type, token.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["batch_size"])
    presents = [value for value in graph.outputs if value is not logits]
    graph.outputs.clear()
    graph.outputs.extend([token.outputs[0], *presents])
    _flat_positions(graph)
    return model, info


def _flat_positions(graph: ir.Graph) -> None:
    """Let `position_ids` have a row per sequence where the graph wants three equal ones (MRoPE of text)."""
    positions = next((value for value in graph.inputs if value.name == "position_ids"), None)
    if positions is None or positions.shape is None or len(positions.shape) != 3:
        return
    flat = ir.Value(name="position_ids", shape=ir.Shape(["batch_size", "sequence_length"]), type=positions.type)
    threefold = ir.Value(
        name="bare.threefold", const_value=ir.tensor([3, 1, 1], dtype=ir.DataType.INT64, name="bare.threefold")
    )
    graph.register_initializer(threefold)
    expand = ir.node("Expand", [flat, threefold])
    positions.replace_all_uses_with(expand.outputs[0])
    positions.name = "bare.positions"
    graph.inputs[graph.inputs.index(positions)] = flat
    graph.insert_before(graph[0], expand)


def peer_info(graph: ir.Graph, config: dict[str, Any]) -> DecoderInfo:
    """How to drive a graph of genai's builder, whose layers may have windows or convolutions.

    config: "model" of genai_config.json.
    """
    decoder = config["decoder"]
    window = decoder.get("sliding_window", {}).get("window_size", 0)
    sizes = {"past_sequence_length": 0, "past_sliding_length": window, "kv_cache_dim": decoder["head_size"]}
    states = []
    for value in graph.inputs:
        name = value.name or ""
        if not name.startswith("past"):
            continue
        shape = tuple(size if isinstance(size, int) else sizes[str(size.value)] for size in value.shape[1:])
        kind = "full" if 0 in shape else "window" if "past_sliding_length" in str(value.shape) else "convolution"
        states.append(
            State(
                layer=int(name.split(".")[1]),
                kind=kind,  # type: ignore[arg-type]
                past=name,
                present="present" + name[len("past_key_values" if name.startswith("past_key") else "past") :],
                dtype=value.dtype.name.lower(),
                shape=shape,
            )
        )
    return DecoderInfo(
        model_type=config["type"],
        kv_form="shared",
        num_layers=decoder["num_hidden_layers"],
        states=tuple(states),
        kv_dtype=states[0].dtype,
        context_length=config["context_length"],
        left_padding=False,
        ragged_chunks=False,
    )


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: opens_loops (whether loops are opened), threads."""
    if settings["opens_loops"]:
        share_thread_pool(settings["threads"])
    loops: dict[str, ArgMaxLoop] = {}
    first: dict[str, int] = {}

    def open_(name: str, path: str) -> None:
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        folder = Path(path)
        model, info = (bare_peer if (folder / "genai_config.json").is_file() else bare_export)(folder)
        loops[name] = ArgMaxLoop(open_graph(folder, model, library_path(), options), info)

    def prefill(name: str, prompt: list[int], room: int) -> float:
        began = time.perf_counter()
        first[name] = loops[name].prefill(prompt, len(prompt) + room)
        return time.perf_counter() - began

    def turn(name: str, steps: int) -> float:
        return median_step_seconds(loops[name].step, steps)

    def first_token(path: str, prompt: list[int]) -> float:
        """Seconds to open a model, as its users do, and to draw a token. The model stays open."""
        began = time.perf_counter()
        model = TopWModel.from_pretrained(path, intra_op_num_threads=settings["threads"])
        model.generate(prompt, max_new_tokens=1, temperature=0)
        kept.append(model)
        return time.perf_counter() - began

    kept: list[TopWModel] = []
    return {"open": open_, "prefill": prefill, "turn": turn, "first": lambda: first, "first_token": first_token}
