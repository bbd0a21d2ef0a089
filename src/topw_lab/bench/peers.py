"""The worker for other libraries: onnxruntime-genai's samplers and loop, and transformers' `generate`.

It runs in environments without topw_deploy, and imports that only for logits processors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many


def start(settings: Any) -> dict[str, Callable[..., Any]]:
    """Start the task of the settings: "sample" or "decode" of onnxruntime-genai, or "transformers"."""
    tasks = {"sample": start_sampling, "decode": start_decoding, "transformers": start_generate}
    return tasks[settings["task"]](settings)


def _import_genai() -> Any:
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    return og


def start_sampling(settings: Any) -> dict[str, Callable[..., Any]]:
    """Load onnxruntime-genai and a model without weights. Returns `time` (seconds per step).

    settings: "folder" (with the model in genai/, and the logits [B, V] of each case in logits-0.npy and so on), "sides"
        (name of each side -> search options), and "temperatures" of the cases.
    """
    og, folder = _import_genai(), Path(settings["folder"])
    model = og.Model(str(folder / "genai"))

    @cache
    def sampler(side: str, case: int) -> tuple[Callable[[], float], int]:
        """A function that draws a token per sequence from the logits of a case, and the calls per sample.

        A generator accepts logits only after it has computed some. So each draw first rewinds the generator and runs a
        model without weights. Only `generate_next_token` is timed.
        """
        logits, options = np.load(folder / f"logits-{case}.npy"), settings["sides"][side]
        batch, vocab = logits.shape
        if options["do_sample"]:
            options = {**options, "temperature": settings["temperatures"][case]}
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=16, batch_size=batch, random_seed=1, **options)
        generator, prompt = og.Generator(model, params), np.zeros((batch, 1), np.int32)
        logits = np.ascontiguousarray(logits).reshape(batch, 1, vocab)

        def draw() -> float:
            generator.rewind_to(0)
            generator.append_tokens(prompt)
            generator.set_logits(logits)
            started = time.perf_counter()
            generator.generate_next_token()
            seconds = time.perf_counter() - started
            generator.get_next_tokens()
            return seconds

        draw()
        return draw, max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(draw(), 1e-9))))

    def time_step(side: str, case: int) -> float:
        draw, calls = sampler(side, case)
        return sum(draw() for _ in range(calls)) / calls

    return {"time": time_step}


def start_decoding(settings: Any) -> dict[str, Callable[..., Any]]:
    """Load a model in onnxruntime-genai. Returns `run`, which generates once; see `decode.start`.

    settings: "folder" (a model that genai's builder wrote), "search" options, and "threads" of the session.
    """
    og = _import_genai()
    config = og.Config(settings["folder"])
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        params = og.GeneratorParams(model)
        params.set_search_options(
            max_length=len(prompt) + new_tokens, batch_size=1, random_seed=1, **settings["search"]
        )
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([prompt], np.int32))
        generator.generate_next_token()
        tokens = [int(generator.get_next_tokens()[0])]
        first = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": len(tokens)}

    return {"run": run}


def start_generate(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Load a model of transformers. Returns `run`; see `decode.start`.

    settings: "folder" (of the model), "threads" of PyTorch, "search" (fields of a GenerationConfig), and "processor":
        "topw" for Top-W, or the path of the authors' file; None without a logits processor.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32, local_files_only=True)
    model.eval()
    processors = []
    if settings["processor"] == "topw":
        from topw_deploy.sampling.processor import TopWLogitsProcessor

        processors = [TopWLogitsProcessor(model)]
    elif settings["processor"] is not None:
        from topw_lab.bench.base import load_processor

        # With this project's defaults, which differ from the authors'.
        table = model.get_input_embeddings().weight
        processors = [load_processor(Path(settings["processor"]))(table, alt_iters=3, geom_scale=1.0)]
    # The folder's config could set top_k or end sequences early.
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, **settings["search"])

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        ids, times = torch.tensor([prompt]), list[float]()
        streamer = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        torch.manual_seed(1)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                logits_processor=processors,
                streamer=streamer,
            )
        first, last = times[1], times[-1]  # times[0] is when `generate` gave the prompt
        return {"first": first - started, "rest": last - first, "tokens": out.shape[1] - len(prompt)}

    return {"run": run}
