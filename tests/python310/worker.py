"""Tasks that run in the oldest supported environment, and in the tests' own to compare the answers.

`python worker.py FILE` runs the tasks of a JSON file, [name, *arguments] each, and prints a list of their answers.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

PARTS = ("sampling", "runtime", "tensorrt", "plugins", "cli")
"""Packages that need no library of the exporter."""
ELSEWHERE = ("topw_deploy.sampling.torch", "topw_deploy.plugins.tensorrt.plugin", "topw_deploy.plugins.libtopw")
"""Modules that need torch or TensorRT, and a shared library that is not a module of Python."""

PROMPTS = ["class Path", "def parse("]
SETTINGS: dict[str, Any] = {"seed": 3, "max_new_tokens": 24, "temperature": 1.3, "lam": 0.5, "ignore_eos": True}
EDITED = {**SETTINGS, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "logit_bias": {65: -5.0}}


def versions() -> dict[str, str]:
    import onnxruntime

    return {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__}


def import_modules() -> list[str]:
    """Import all modules of PARTS. Returns their names."""
    names = []
    for part in PARTS:
        package = importlib.import_module(f"topw_deploy.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(ELSEWHERE):
                importlib.import_module(module.name)
                names.append(module.name)
    return names


def generate_tokens(folder: str, sampler: str = "auto", provider: str = "cpu") -> dict[str, Any]:
    """The tokens of a batch, a stream, a batch with edits, and a long prompt; or the error of opening the folder."""
    from topw_deploy.errors import TopWError
    from topw_deploy.runtime import TopWModel

    try:
        model = TopWModel.from_pretrained(folder, provider=provider, sampler=sampler, intra_op_num_threads=1)
    except TopWError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    long = (model.tokenizer.encode(PROMPTS[0]) * 30)[:150]
    pieces = list(model.stream(PROMPTS[0], **SETTINGS))
    streamed = pieces[-1].result
    assert streamed is not None
    assert "".join(piece.text for piece in pieces) == streamed.text
    return {
        "sampler": model.sampler,
        "batch": [result.token_ids for result in model.generate(PROMPTS, **SETTINGS)],
        "kept": [result.kept for result in model.generate(PROMPTS, **SETTINGS)],
        "stream": streamed.token_ids,
        "edited": [result.token_ids for result in model.generate(PROMPTS, **EDITED)],
        "long": model.generate(long, **SETTINGS).token_ids,
    }


def sample_logits(folder: str) -> dict[str, Any]:
    import numpy as np

    from topw_deploy.runtime import TopWSampler

    sampler = TopWSampler.from_pretrained(folder, provider="cpu")
    logits = np.random.default_rng(0).normal(0, 3, (8, sampler.vocab_size)).astype(np.float32)
    drawn = sampler.sample(logits, seed=1, position=2, temperature=1.2, lam=0.4)
    return {"tokens": drawn.next_token.tolist(), "kept": drawn.kept.tolist()}


def place_nodes(folder: str) -> dict[str, Any]:
    """Open a folder with a provider that takes no node, without and with allow_fallback."""
    from topw_deploy.errors import ProviderError
    from topw_deploy.runtime import TopWModel

    try:
        TopWModel.from_pretrained(folder, provider="azure")
        refused = ""
    except ProviderError as error:
        refused = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = TopWModel.from_pretrained(folder, provider="azure", allow_fallback=True)
    computing = sorted({node.operator for node in model.cpu_nodes if node.computes})
    return {"refused": refused, "warned": [str(one.message) for one in caught], "computing": computing}


def main(path: str) -> None:
    steps = json.loads(Path(path).read_text(encoding="utf-8"))
    known = {
        function.__name__: function
        for function in (versions, import_modules, generate_tokens, sample_logits, place_nodes)
    }
    answers = [known[name](*arguments) for name, *arguments in steps]
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
