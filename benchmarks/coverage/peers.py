"""The model types that other exporters list, read from their installed packages.

    make peers && python -m benchmarks.coverage.peers .peers      (rewrites peers.json)

A listed type has an entry in the exporter; no export is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coverage.architectures import all_types

FILE = Path(__file__).with_name("peers.json")
_GENAI = """
import importlib.metadata, importlib.util, json
found = importlib.util.find_spec("onnxruntime_genai.models.builder")
print(json.dumps([importlib.metadata.version("onnxruntime-genai"), open(found.origin).read()]))
"""
_MOBIUS = """
import importlib.metadata, json
from mobius._registry import registry
print(json.dumps([importlib.metadata.version("mobius-onnx"), registry.architectures()]))
"""
_OPTIMUM = """
import importlib.metadata, json
import optimum.exporters.onnx.model_configs
from optimum.exporters.tasks import TasksManager
listed = TasksManager.get_supported_model_type_for_task("text-generation", "onnx")
print(json.dumps([importlib.metadata.version("optimum-onnx"), listed]))
"""
# Class names in released checkpoints that transformers spells differently or lacks -> model type.
_HUB_CLASSES = {"PhiMoEForCausalLM": "phimoe", "Phi4MMForCausalLM": "phi4_multimodal"}


@dataclass(frozen=True)
class Peer:
    """Another exporter. types: of transformers' causal-LM map, sorted."""

    name: str
    version: str
    types: tuple[str, ...]


def read_peers() -> list[Peer]:
    """The exporters in peers.json."""
    return [Peer(each["name"], each["version"], tuple(each["types"])) for each in json.loads(FILE.read_text("utf-8"))]


def peers_of(environments: Path) -> list[Peer]:
    """Query the packages in `environments`, which `make peers` creates."""
    genai, optimum = (environments / name / "bin" / "python" for name in ("genai", "optimum"))
    version, source = _run_query(genai, _GENAI)
    found = [_peer("onnxruntime-genai", version, types_of_classes(dispatched_classes(source)))]
    found.append(_peer("mobius-onnx", *_run_query(genai, _MOBIUS)))
    found.append(_peer("optimum-onnx", *_run_query(optimum, _OPTIMUM)))
    return found


def dispatched_classes(source: str) -> set[str]:
    """Class names that Python code compares `….architectures[0]` with."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("architectures[0]"):
            found |= {side.value for side in node.comparators if isinstance(side, ast.Constant)}
    return {name for name in found if isinstance(name, str)}


def types_of_classes(classes: set[str]) -> set[str]:
    """Model types one of whose classes, in any of transformers' maps, is in `classes`."""
    from transformers.models.auto import modeling_auto

    maps = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found = {_HUB_CLASSES[name] for name in classes & _HUB_CLASSES.keys()}
    for each in maps:
        for model_type, names in each.items():
            if classes & set([names] if isinstance(names, str) else names):
                found.add(model_type)
    return found


def _peer(name: str, version: str, types: set[str] | list[str]) -> Peer:
    if "gpt2" in types:
        types = {*types, "gpt-sw3"}  # its checkpoints say gpt2
    return Peer(name, version, tuple(sorted(set(types) & all_types().keys())))


def _run_query(python: Path, code: str) -> list:
    done = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path, help="what `make peers` made")
    found = peers_of(parser.parse_args().environments)
    stored = [{"name": peer.name, "version": peer.version, "types": peer.types} for peer in found]
    FILE.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    sys.stderr.write(", ".join(f"{peer.name} {peer.version}: {len(peer.types)}" for peer in found) + "\n")


if __name__ == "__main__":
    main()
