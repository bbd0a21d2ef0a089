"""transformers' `generate` over its own model or optimum's ORTModelForCausalLM.

This file imports topw_deploy only for logits processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig


class _Clock:
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings:

    library: "transformers" or "optimum".
    folder, threads.
    search: fields of a GenerationConfig.
    processor: None, "topw", or the authors' file.
    """
    torch.set_num_threads(settings["threads"])
    make_processors = _processors(settings["processor"])  # before the model, to fail early
    began = time.perf_counter()
    model = _load(settings)
    took = time.perf_counter() - began
    processors = make_processors(model)
    # The folder's config could set top_k or end sequences early.
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, **settings["search"])

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        ids, clock = torch.tensor([prompt]), _Clock()
        torch.manual_seed(1)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                logits_processor=processors,
                streamer=clock,
            )
        first, last = clock.times[1], clock.times[-1]
        return {"first": first - started, "rest": last - first, "tokens": out.shape[1] - len(prompt)}

    return {"run": run, "load_seconds": lambda: took}


def _load(settings: dict[str, Any]) -> Any:
    if settings["library"] == "optimum":
        import onnxruntime as ort
        from optimum.onnxruntime import ORTModelForCausalLM  # type: ignore[import-not-found]

        options = ort.SessionOptions()
        options.intra_op_num_threads = settings["threads"]
        options.log_severity_level = 3
        return ORTModelForCausalLM.from_pretrained(
            settings["folder"], provider="CPUExecutionProvider", session_options=options
        )
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32, local_files_only=True).eval()


def _processors(wanted: str | None) -> Callable[[Any], list[Any]]:
    if wanted is None:
        return lambda _model: []
    if wanted == "topw":
        from topw_deploy.processors import TopWLogitsProcessor

        return lambda model: [TopWLogitsProcessor(model)]
    from topw_deploy.bench.sides import load_processor

    theirs = load_processor(Path(wanted))
    # this project's defaults
    return lambda model: [theirs(model.get_input_embeddings().weight, alt_iters=3, geom_scale=1.0)]
