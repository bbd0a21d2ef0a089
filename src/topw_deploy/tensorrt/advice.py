"""What to do after a check, in one line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from topw_deploy.manifest import DecoderManifest, Manifest


class Sorted(Protocol):
    """As far as advice needs a NodeVerdict."""

    @property
    def operator(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def reason(self) -> str: ...


def next_step(
    passed: bool, needs_plugin: bool, nodes: Sequence[Sorted], target: str, manifest: Manifest, out: Path
) -> str:
    """passed, needs_plugin: as the report says. nodes: its verdicts."""
    if target == "onnxruntime":
        if passed and not isinstance(manifest, DecoderManifest):
            return "open the folder with topw_deploy.runtime.TopWSampler, or give model.onnx to onnxruntime"
        return f"topw generate {_quoted(out)} PROMPT" if passed else "export the model again for onnxruntime"
    refused = {node.operator for node in nodes if node.verdict == "unsupported"}
    if not passed and refused:
        return _export_again(refused, manifest)
    if not passed:
        return "install a newer TensorRT, or run the folder with onnxruntime"
    if needs_plugin:
        return "topw plugins build --cuda (for Python) or --tensorrt-root DIR (for C++): the function cannot stand in"
    if not isinstance(manifest, DecoderManifest):
        return "give model.onnx to TensorRT's parser, for a profile of your batches and edits"
    if manifest.decoder.kv_form != "static" or manifest.decoder.target != "tensorrt":
        return (
            "topw build-engine builds decoders with a cache in place: export with --target tensorrt --max-length N; "
            "this graph is for other builders"
        )
    without = " --plugin none" if any(node.verdict == "inlined" and node.reason for node in nodes) else ""
    return f"topw build-engine {_quoted(out)}{without}"


def _export_again(refused: set[str], manifest: Manifest) -> str:
    if not isinstance(manifest, DecoderManifest):
        return f"export the sampler again with --tail portable or static, and --top-m at most 3840 ({_told(refused)})"
    if manifest.source.get("route") == "graft":
        return (
            f"this decoder came from another exporter ({_told(refused)}): export the model that it was made of, with "
            "--target tensorrt --max-length N"
        )
    wanted = "--target tensorrt --max-length N"
    if manifest.decoder.quantisation:
        wanted += " and --dtype fp16 in place of the quantised weights"
    return f"export again with {wanted} ({_told(refused)})"


def _told(refused: set[str]) -> str:
    return ", ".join(sorted(refused))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
