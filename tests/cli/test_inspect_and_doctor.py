"""`topw inspect` and `topw doctor`: what they show, and what they refuse."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from msgspec.structs import replace

from tests.support.invoking import Invoke
from topw_deploy import install
from topw_deploy.cli import doctor
from topw_deploy.errors import ManifestError
from topw_deploy.manifest import (
    MANIFEST_NAME,
    Check,
    NotCompared,
    Note,
    Verification,
    key_value_states,
    load_decoder_manifest,
    save_manifest,
)
from topw_deploy.plugins import library


def test_inspect_shows_what_the_folder_holds(invoke: Invoke, random_model: Path) -> None:
    shown = invoke("inspect", random_model).stdout
    for part in ("decoder", "toy", "96 tokens", "vocabulary", "259", "uniform", "temperature", "past_key_values.*.key"):
        assert part in shown
    assert "past_key_values.1.key" not in shown
    assert "model.onnx" in shown


Changed = Callable[..., Path]


@pytest.fixture
def changed(random_model: Path, tmp_path: Path) -> Changed:
    """Returns a copy of a model's folder whose manifest has other values. decoder: fields of DecoderInfo."""
    folder = tmp_path / "out"
    shutil.copytree(random_model, folder)
    manifest = load_decoder_manifest(folder)

    def change(decoder: dict[str, Any] | None = None, **fields: Any) -> Path:
        save_manifest(folder, replace(manifest, decoder=replace(manifest.decoder, **(decoder or {})), **fields))
        return folder

    return change


QUANTISED = {"bits": 4, "block_size": 64, "symmetric": True, "accuracy_level": 4, "exclude": []}
# Fields of DecoderInfo -> what `inspect` shows. Two layers, one head of size 3 and 2, keys and values, 2 bytes:
# 2 x 5 x 2 = 20 bytes per token.
SHOWN: list[tuple[dict[str, Any], list[str]]] = [
    ({"quantisation": QUANTISED}, ["blocks of 64, symmetric, accuracy level 4, table and head 4 bits"]),
    ({"quantisation": {**QUANTISED, "table_bits": 8}}, ["table and head 8 bits"]),
    (
        {"kv_form": "static", "buffer_step": 4096, "buffer_least": 4096},
        ["4096 tokens, fixed at the export (--max-length)"],
    ),
    (
        {
            "kv_form": "static",
            "attention": "GroupQueryAttention",
            "states": (*key_value_states(0, "float16", 1, 3, 3), *key_value_states(1, "float16", 1, 2, 2)),
            "kv_dtype": "float16",
            "context_length": 1024,
            "left_padding": False,
            "ragged_chunks": False,
            "buffer_step": 256,
            "weights": {"int4": 3 << 20, "float16": 1 << 20},
        },
        [
            "static: one buffer, written in place",
            "GroupQueryAttention",
            "2 layers, float16 1 x tokens x 2, float16 1 x tokens x 3: 20 bytes a token",
            "20.5 kB for one sequence of the full context",
            "in steps of 256 tokens",
            "each row's prompt chunks after the first run separately",
            "must have equal lengths",
            "int4 3.1 MB; float16 1.0 MB; 4.2 MB in all",
        ],
    ),
]


@pytest.mark.parametrize(("decoder", "parts"), SHOWN)
def test_inspect_shows_the_cache_and_the_weights(
    invoke: Invoke, changed: Changed, decoder: dict[str, Any], parts: list[str]
) -> None:
    shown = invoke("inspect", changed(decoder)).stdout
    assert [part for part in parts if part not in shown] == []


def test_inspect_shows_checks_what_was_not_compared_and_notes_apart(invoke: Invoke, changed: Changed) -> None:
    verification = Verification(
        status="partial",
        checks=(Check("left-padded batch logits", False, 3.0, 1e-4, "prompts must have equal lengths"),),
        not_compared=(NotCompared("generation (defaults)", "4 of 10 tokens"),),
        notes=(Note("tokens compared with float32", "26 of 32 equal"),),
    )
    printed = invoke("inspect", changed(verification=verification)).stdout
    shown = [" ".join(line.split()) for line in printed.splitlines()]
    place = shown.index("status partial")
    assert shown[place + 1 : place + 4] == [
        "left-padded batch logits FAILED, 3 (bound 0.0001) prompts must have equal lengths",
        "generation (defaults) not compared, 4 of 10 tokens",
        "tokens compared with float32 for information, 26 of 32 equal",
    ]


def test_inspect_gives_the_manifest_as_json(invoke: Invoke, random_model: Path) -> None:
    found = json.loads(invoke("inspect", random_model, "--json").stdout)
    assert found == json.loads((random_model / MANIFEST_NAME).read_text())


def test_inspect_refuses_a_folder_that_is_no_export_and_a_file(invoke: Invoke, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="not a finished export"):
        invoke("inspect", tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"")
    for command in ("inspect", "check", "build-engine"):
        with pytest.raises(ManifestError, match=r"model.onnx is a file; give the folder that topw-export wrote"):
            invoke(command, tmp_path / "model.onnx")


def test_doctor_shows_which_provider_would_be_used(invoke: Invoke) -> None:
    lines = invoke("doctor").stdout.splitlines()
    assert f"  onnxruntime      {ort.__version__}" in lines
    assert "a model would run on: cpu" in lines or "CUDAExecutionProvider" in ort.get_available_providers()
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["providers"]["cpu"] == "starts"
    assert set(found["versions"]) >= set(doctor.RUNTIME_PACKAGES)


def test_doctor_fails_where_models_cannot_run(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    shown = invoke("doctor").stdout
    assert f"run: {install.install_command('cpu')}" in shown
    assert "a model would run on: nothing" in shown
    assert doctor.diagnose()["problems"]


def test_doctor_says_whether_engines_can_run(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tensorrt")
    module.__version__ = "10.15.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    assert "TensorRT: 10.15.1" in invoke("doctor").stdout.splitlines()
    for name in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    (line,) = (line for line in invoke("doctor").stdout.splitlines() if line.startswith("TensorRT: "))
    assert line.startswith("TensorRT: none: TensorRT's Python module is not installed; ")
    assert line.endswith(install.install_command("tensorrt"))


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fatbin with an empty entry of each (kind, architecture)."""
    body = b"".join(struct.pack("<HHIQIIHHI", kind, 0x101, 64, 8, 0, 0, 0, 0, number) + b"." * 40
                    for kind, number in entries)  # fmt: skip
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize(("architecture", "runs"), [(87, False), (89, True), (110, False), (121, True)])
def test_doctor_reports_a_gpu_for_which_the_provider_has_no_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: int, runs: bool
) -> None:
    """The code of the index's wheel for aarch64, between other bytes."""
    library_file = tmp_path / "provider.so"
    library_file.write_bytes(b"x" * 9 + fatbin((2, 89), (2, 90)) + b"y" * 5 + fatbin((2, 120), (2, 121)))
    monkeypatch.setattr(doctor, "_CUDA_PROVIDER", str(library_file))
    driver = library.Driver("13.2", (library.Device("A GPU", architecture),), "")
    monkeypatch.setattr(library, "query_driver", lambda: driver)
    problems = [what for what, _ in doctor.diagnose()["problems"]]
    missing = "onnxruntime's CUDA provider has code for sm_89 sm_90 sm_120 sm_121, but none for A GPU"
    assert problems == ([] if runs else [f"{missing} (sm_{architecture})"])
    assert library.read_gpu_code(library_file).code == {89, 90, 120, 121}
    library_file.write_bytes(fatbin((1, 80))[:-1])
    assert library.read_gpu_code(library_file).ptx == {80}


def test_doctor_reports_two_wheels_that_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.31.1" if name == "onnxruntime-gpu" else real(name))
    cure = f"{install.pip_command('uninstall')} -y onnxruntime onnxruntime-gpu && {install.install_command('gpu')}"
    what = "onnxruntime and onnxruntime-gpu overwrite each other's files"
    assert doctor.diagnose()["problems"] == [(what, cure)]


def test_doctor_names_what_exporting_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = install.is_importable
    monkeypatch.setattr(install, "is_importable", lambda name: name not in ("torch", "onnx") and real(name))
    found = doctor.diagnose()
    what = "exporting needs torch and onnx, which are not installed"
    assert found["hints"] == [(what, install.install_command("export"))]
    assert not found["problems"]


def test_doctor_lists_what_each_extra_lacks(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    real = install.is_importable
    monkeypatch.setattr(install, "is_importable", lambda name: name not in ("ray", "h11", "anyio") and real(name))
    lines = invoke("doctor").stdout.splitlines()
    assert f"extras ({install.install_command('NAME')})" in lines
    assert {
        "  serve            lacks h11, anyio",
        "  ray              lacks ray",
        "  plot             installed",
    } < set(lines)


def test_verify_refuses_an_export_whose_verification_did_not_finish(invoke: Invoke, changed: Changed) -> None:
    with pytest.raises(ManifestError, match="verification did not finish"):
        invoke("verify", changed(verification=Verification(status="provisional")), "--hashes-only")
