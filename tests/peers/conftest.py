"""Folders made by real exporters, and their tools (`make peers`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared import skip_or_fail
from topw_deploy.export import export_model
from topw_deploy.export.options import ExportReport

from .models import PEERS, Peer

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("TOPW_PEERS", HERE.parents[1] / ".peers"))
_ENVIRONMENTS = {"optimum": "optimum", "genai": "genai", "mobius": "genai"}


def pytest_runtest_setup() -> None:
    """Without the folders, skip, or fail where required."""
    for name in PEERS:
        if not (ROOT / "folders" / name / "model.onnx").is_file():
            skip_or_fail(f"{ROOT / 'folders'} lacks {name}; `make peers` makes it")


@dataclass(frozen=True)
class Folder:
    """A peer's folder and its source checkpoint."""

    name: str
    peer: Peer
    path: Path
    checkpoint: Path


@dataclass(frozen=True)
class Imported:
    """An imported decoder, and the export's output."""

    source: Folder
    path: Path
    report: ExportReport


@pytest.fixture(scope="session")
def folder() -> Callable[[str], Folder]:
    def find(name: str) -> Folder:
        peer = PEERS[name]
        return Folder(name, peer, ROOT / "folders" / name, ROOT / "checkpoints" / peer.checkpoint)

    return find


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory, folder: Callable[[str], Folder]) -> Callable[..., Imported]:
    """name -> its import with its maker's logits, made once.

    verify: verify the export.
    """
    made: dict[tuple[str, bool], Imported] = {}

    def make(name: str, *, verify: bool = False) -> Imported:
        if (name, verify) not in made:
            source = folder(name)
            complete = any((source.path / file).is_file() for file in ("config.json", "genai_config.json"))
            has_tokenizer = (source.path / "tokenizer.json").is_file()
            out = tmp_path_factory.mktemp("imported") / name
            tokenizer = None if complete and has_tokenizer else source.checkpoint
            report = export_model(source.path, out, with_logits=True, verify=verify, tokenizer=tokenizer)
            made[name, verify] = Imported(source, out, report)
        return made[name, verify]

    return make


@pytest.fixture(scope="session")
def own_tool() -> Callable[..., list[list[list[int]]]]:
    """(maker, folders, prompts, new_tokens) -> greedy tokens per folder and row."""

    def run(maker: str, folders: list[Path], prompts: list[list[int]], new_tokens: int) -> list[list[list[int]]]:
        environment = _ENVIRONMENTS[maker]
        tasks = [{"folder": str(path), "prompts": prompts, "new_tokens": new_tokens} for path in folders]
        done = subprocess.run(
            [ROOT / environment / "bin" / "python", HERE / f"run_{environment}.py", json.dumps(tasks)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answer: list[list[list[int]]] = json.loads(done.stdout)
        return answer

    return run


@pytest.fixture(scope="session")
def torch_greedy() -> Callable[[Path, list[int], int], list[int]]:
    """(checkpoint, prompt, new tokens) -> transformers' greedy tokens in float32."""
    models: dict[Path, Any] = {}

    def generate(checkpoint: Path, prompt: list[int], new_tokens: int) -> list[int]:
        import torch
        from transformers import AutoModelForCausalLM

        if checkpoint not in models:
            models[checkpoint] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(new_tokens):
                logits = models[checkpoint](input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return generate
