"""The worker for transformers' `generate`, with a model of transformers or an ORTModelForCausalLM of optimum.

It imports topw_deploy only for logits processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig


class _TokenClock:
    """A streamer that records when `generate` gives the prompt, and then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns `run`, which generates once; see `decode.start`.

    settings: "library" ("transformers" or "optimum"), "folder" (a model in its format), "threads" of PyTorch or of the
        session, "search" (fields of a GenerationConfig), and "processor": "topw" for Top-W, or the path of the authors'
        file; None without a logits processor.
    """
    torch.set_num_threads(settings["threads"])
    make_processors = _processor_maker(settings["processor"])  # refuses a wrong file before the model is loaded
    model = _load_model(settings)
    processors = make_processors(model)
    # The folder's config could set top_k or end sequences early.
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, **settings["search"])

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        ids, clock = torch.tensor([prompt]), _TokenClock()
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
        first, last = clock.times[1], clock.times[-1]  # times[0] is when `generate` gave the prompt
        return {"first": first - started, "rest": last - first, "tokens": out.shape[1] - len(prompt)}

    return {"run": run}


def _load_model(settings: dict[str, Any]) -> Any:
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


def _processor_maker(processor: str | None) -> Callable[[Any], list[Any]]:
    """A function that makes the logits processors for a model."""
    if processor is None:
        return lambda _model: []
    if processor == "topw":
        from topw_deploy.sampling.processor import TopWLogitsProcessor

        return lambda model: [TopWLogitsProcessor(model)]
    from topw_lab.bench.sides import load_processor

    processor_class = load_processor(Path(processor))
    # With this project's defaults, which differ from the authors'.
    return lambda model: [processor_class(model.get_input_embeddings().weight, alt_iters=3, geom_scale=1.0)]
