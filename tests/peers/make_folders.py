"""Make the folders of models.py with the real tools: `python -m tests.peers.make_folders .peers`.

The tools' environments are .peers/optimum and .peers/genai (`make peers` makes them from the pinned files beside this
one). Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers.utils import logging

from tests.support.tiny_models import write_checkpoint

from .models import CONFIGS, PEERS, Peer

HERE = Path(__file__).parent
ENVIRONMENTS = {"optimum": "optimum", "genai": "genai", "mobius": "genai"}


def command(peer: Peer, checkpoint: Path, folder: Path) -> list[str]:
    """First the tool, then its arguments."""
    if peer.maker == "optimum":
        task = ("--task", "text-generation-with-past", "--framework", "pt")
        return ["optimum", "--model", str(checkpoint), *task, *peer.options, str(folder)]
    if peer.maker == "mobius":
        return ["mobius", "build", "--config", str(checkpoint), str(folder), *peer.options]
    cache = str(folder.with_name(".cache"))
    return ["genai", "-m", peer.checkpoint, "-i", str(checkpoint), "-o", str(folder), "-c", cache, *peer.options]


def build(python: Path, commands: list[list[str]], log: Path) -> None:
    """Run `commands` by the tools of `python`, with output to `log`; show its end on failure."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as out:
        done = subprocess.run(
            [python, HERE / "run_builders.py", json.dumps(commands)],
            stdout=out,
            stderr=out,
            env=environment,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{python} failed:\n{log.read_text()[-3000:]}")


def make(root: Path, pythons: dict[str, Path]) -> None:
    """Checkpoints to root/checkpoints, folders to root/folders, logs beside them."""
    logging.disable_progress_bar()
    checkpoints, folders = root / "checkpoints", root / "folders"
    for name in sorted({peer.checkpoint for peer in PEERS.values()}):
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        write_checkpoint(checkpoints / name, CONFIGS[name]())
    commands: dict[str, list[list[str]]] = {environment: [] for environment in pythons}
    for name, peer in PEERS.items():
        shutil.rmtree(folders / name, ignore_errors=True)
        words = command(peer, checkpoints / peer.checkpoint, folders / name)
        commands[ENVIRONMENTS[peer.maker]].append(words)
    folders.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(build, python, commands[name], root / f"{name}.log") for name, python in pythons.items()]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    root = Path(sys.argv[1]).absolute()
    make(root, {name: root / name / "bin" / "python" for name in ("optimum", "genai")})
