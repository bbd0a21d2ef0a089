"""The worker of `benchmarks.kv`: bare greedy loops over several graphs with the same weights, in turns of a few steps.

Every graph ends in ArgMax and is driven by the same lines of Python (`ArgMaxLoop`), each with the cache that it has.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.bench.decode.argmax import FILE, ArgMaxLoop, share_weights, with_argmax
from topw_deploy.export.foreign.load import load_decoder
from topw_deploy.manifest import DecoderInfo, load_manifest

UNCOUNTED = 2  # steps at the beginning of a turn


def bare_export(export: Path, folder: Path) -> tuple[Path, DecoderInfo]:
    """An export of this project with ArgMax for its sampler, and how its cache is driven."""
    decoder = load_manifest(export).decoder
    assert decoder is not None
    return with_argmax(export, folder), decoder


def bare_peer(peer: Path, folder: Path) -> tuple[Path, DecoderInfo]:
    """onnxruntime-genai's graph as its builder wrote it, and after it ArgMax over the last column's logits."""
    info = load_decoder(peer / "model.onnx", peer).info
    model = ir.load(peer / "model.onnx")
    graph = model.graph
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
    share_weights(peer, folder)
    ir.save(model, folder / FILE)
    return folder / FILE, info


def turn(loop: ArgMaxLoop, steps: int) -> float:
    """Seconds of a step: the median of `steps`, after those that are not counted."""
    for _ in range(UNCOUNTED):
        loop.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: scratch (a folder), ours (exports by name), genai (its folder or None), threads, seed."""
    # One pool for all sessions: with one each, the threads of the session that has just stopped would spin for a while
    # on the core that the next one needs.
    ort.set_global_thread_pool_sizes(settings["threads"], 1)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    order = random.Random(settings["seed"])
    makers = {name: (bare_export, folder) for name, folder in settings["ours"].items()}
    if settings["genai"] is not None:
        makers["genai"] = (bare_peer, settings["genai"])
    loops: dict[str, ArgMaxLoop] = {}
    # which weights lie where is luck that lasts as long as the sessions: drawn anew in every process
    for name in order.sample(list(makers), len(makers)):
        make, source = makers[name]
        folder = Path(settings["scratch"]) / name
        folder.mkdir(exist_ok=True)
        file, decoder = make(Path(source), folder)
        loops[name] = ArgMaxLoop(file, decoder, options)

    def sweep(prompt: list[int], turns: int, steps: int) -> dict[str, Any]:
        """From the prompt on, `turns` turns of every loop. Seconds of a step by loop, turn by turn; of each prefill;
        and each loop's first token, which must be the same."""
        room = len(prompt) + turns * (steps + UNCOUNTED) + 1
        prefills, first, found = {}, {}, []
        for name in order.sample(list(loops), len(loops)):
            started = time.perf_counter()
            first[name] = loops[name].prefill(prompt, room)
            prefills[name] = time.perf_counter() - started
        for _ in range(turns):
            found.append({name: turn(loops[name], steps) for name in order.sample(list(loops), len(loops))})
        return {"turns": found, "prefill": prefills, "first": first}

    return {"sweep": sweep}
