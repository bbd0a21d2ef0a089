"""Python 3.10 with onnxruntime 1.23 gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import export, write_checkpoint
from topw_deploy.export.sampler_only import SamplerRequest, export_sampler

from . import worker
from .conftest import Ask, Command

pytestmark = pytest.mark.long

SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_tied", {}),
    "llama-half": ("llama_tied", {"dtype": "fp16"}),
    "llama-static-tail": ("llama_tied", {"tail": "static"}),
    "llama-nested-tail": ("llama_tied", {"tail": "onnxruntime"}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "gemma3-copied": ("gemma3", {"kv": "concat"}),
    "gemma2-copied": ("gemma2", {"kv": "concat"}),
    "mistral-copied": ("mistral", {"kv": "concat"}),
}
"""Exports whose tokens are those of the newest onnxruntime."""
OTHER_KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("llama_tied", {"dtype": "int4"}),
    "int4-half": ("llama_tied", {"dtype": "int4", "compute_dtype": "fp16"}),
    "int8": ("llama_tied", {"dtype": "int8"}),
}
"""Exports that run, with roundings of their own in products with quantised weights."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows": ("gemma3", {}, "makes one token too long; export with --kv concat"),
    "tensorrt": ("llama_tied", {"target": "tensorrt"}, "supports at most opset 23; export without --target tensorrt"),
}

Folder = Callable[[str, dict[str, Any]], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """(family, export settings) -> a new folder."""
    checkpoints: dict[str, Path] = {}

    def make(family: str, settings: dict[str, Any]) -> Path:
        root = tmp_path_factory.mktemp("folder")
        if family not in checkpoints:
            checkpoints[family] = write_checkpoint(root / "checkpoint", family)
        export(checkpoints[family], root / "out", **settings)
        return root / "out"

    return make


def test_the_oldest_supported_versions_import_every_module(ask: Ask) -> None:
    versions, modules = ask([["versions"], ["import_modules"]])
    assert versions["python"].startswith("3.10.")
    assert versions["onnxruntime"].startswith("1.23.")
    assert {"topw_deploy.tensorrt.run.session", "topw_deploy.cli.doctor", "topw_deploy.tensorrt.build"} <= {*modules}


@pytest.mark.parametrize("sampler", ["auto", "graph"])
def test_the_bundled_model_gives_the_same_tokens(ask: Ask, demo_export: Path, sampler: str) -> None:
    (found,) = ask([["generate_tokens", demo_export, sampler]])
    assert found == worker.generate_tokens(str(demo_export), sampler)
    assert found["sampler"] == ("graph" if sampler == "graph" else "native")
    assert found["batch"] != found["edited"]


def test_every_form_that_runs_gives_the_same_tokens(ask: Ask, folder: Folder) -> None:
    folders = {name: folder(family, settings) for name, (family, settings) in SAME.items()}
    answers = ask([["generate_tokens", path] for path in folders.values()])
    for (name, path), found in zip(folders.items(), answers, strict=True):
        assert found == worker.generate_tokens(str(path)), name


def test_quantised_weights_run_on_the_native_sampler(ask: Ask, folder: Folder) -> None:
    folders = {name: folder(family, settings) for name, (family, settings) in OTHER_KERNELS.items()}
    for name, found in zip(folders, ask([["generate_tokens", path] for path in folders.values()]), strict=True):
        assert found["sampler"] == "native", name
        assert all(len(row) == worker.SETTINGS["max_new_tokens"] for row in found["batch"]), name


def test_a_model_that_would_be_computed_wrongly_is_refused_with_a_remedy(ask: Ask, folder: Folder) -> None:
    folders = {name: folder(family, settings) for name, (family, settings, _) in REFUSED.items()}
    for name, found in zip(folders, ask([["generate_tokens", path] for path in folders.values()]), strict=True):
        assert found["error"].startswith("ManifestError: "), name
        assert REFUSED[name][2] in found["error"], name


def test_a_sampler_alone_draws_the_same(ask: Ask, tmp_path: Path) -> None:
    export_sampler(SamplerRequest(model="demo", output=tmp_path / "out", verify=False))
    (found,) = ask([["sample_logits", tmp_path / "out"]])
    assert found == worker.sample_logits(str(tmp_path / "out"))
    assert len(set(found["kept"])) > 2


def test_nodes_that_a_provider_leaves_to_the_cpu_are_found_by_a_run(ask: Ask, demo_export: Path) -> None:
    (found,) = ask([["place_nodes", demo_export]])
    assert found["refused"].startswith("azure leaves ")
    assert found["refused"].endswith("pass allow_fallback=True to accept that, or use provider='cpu'.")
    assert any(said.startswith("azure leaves ") for said in found["warned"])
    assert {"MatMul", "GroupQueryAttention", "TopWSample"} - {*found["computing"]} <= {"TopWSample"}


def test_the_commands_run_in_python_3_10(command: Command, demo_export: Path) -> None:
    for arguments, shown in (
        (("doctor",), "native sampler: works"),
        (("inspect", demo_export), "GroupQueryAttention"),
        (("check", demo_export, "--target", "onnxruntime"), "native"),
        (("plugins", "show"), "libtopw"),
        (("generate", demo_export, "def parse(", "--seed", "7", "--max-new-tokens", "16", "--stats"), "native sampler"),
    ):
        done = command("topw", *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert shown in done.stdout + done.stderr, arguments


@pytest.mark.parametrize("program", [("topw-export", "demo"), ("topw", "export-sampler", "demo")])
def test_exporting_says_which_python_it_needs(command: Command, tmp_path: Path, program: tuple[str, ...]) -> None:
    done = command(*program, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: exporting needs Python 3.11 or newer, and this is 3.10.")
    assert done.stderr.count("\n") == 1


def test_doctor_says_which_python_exporting_needs(command: Command) -> None:
    assert "hint: exporting needs Python 3.11 or newer" in command("topw", "doctor").stdout
