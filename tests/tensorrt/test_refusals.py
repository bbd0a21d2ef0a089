"""What no engine is built of: exports, bounds and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.tensorrt_double import TensorRT
from tests.support.toy_model import Toy, export, export_sampler
from tests.tensorrt.conftest import CACHE
from topw_deploy.errors import ManifestError, ParameterError, TensorRTError
from topw_deploy.manifest import Verification, load_manifest, save_manifest
from topw_deploy.plugins import library
from topw_deploy.tensorrt.build import build_engine as build


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0, but must be an integer >= 1"),
        ({"max_sequence": CACHE + 1}, "max_sequence is 129, but a run of this export takes at most 128 tokens"),
        ({"max_edits": 0}, "max_edits is 0, but must be an integer >= 1"),
        ({"profile": "all"}, "profile is 'all', but must be one of both, decode, prefill"),
        ({"workspace": 0}, "workspace is 0, but must be at least 1 byte"),
        ({"timing_cache": Path("/absent/timings")}, "timing_cache is /absent/timings, but /absent is not a folder"),
    ],
)
def test_bounds_are_checked_before_tensorrt_is_asked(out: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build(out, **settings)


def test_folders_that_no_engine_can_be_built_of_are_refused(tmp_path: Path) -> None:
    toy = Toy.random(1)
    for form, kind in (("concat", "concat"), ("scatter", "static")):
        with pytest.raises(TensorRTError, match=f"for onnxruntime with a {kind} cache; export with --target tensorrt"):
            build(export(tmp_path / form, toy, form=form))
    with pytest.raises(ManifestError, match="holds a sampler without a decoder"):
        build(export_sampler(tmp_path / "sampler", toy))
    with pytest.raises(ManifestError, match=r"has no topw_manifest\.json"):
        build(tmp_path)


def test_exports_that_are_unfinished_or_leave_the_caches_length_open_are_refused(out: Path) -> None:
    manifest = load_manifest(out)
    save_manifest(out, replace(manifest, verification=Verification(status="provisional")))
    with pytest.raises(ManifestError, match="verification did not finish; export the model again"):
        build(out)
    inputs = [
        replace(i, shape=(*i.shape[:2], "max_length", i.shape[3])) if len(i.shape) == 4 else i for i in manifest.inputs
    ]
    save_manifest(out, replace(manifest, inputs=tuple(inputs)))
    with pytest.raises(TensorRTError, match="has no fixed length; export for TensorRT without --max-length 0"):
        build(out)


def test_what_is_missing_on_the_machine_is_named(trt: TensorRT, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "query_driver", lambda: library.Driver("13.0", (), "the NVIDIA driver sees no GPU"))
    with pytest.raises(TensorRTError, match="no engine can be built or run here: the NVIDIA driver sees no GPU"):
        build(out)
    trt.module.__version__ = "10.14.1"
    with pytest.raises(TensorRTError, match=r"TensorRT 10.14.1, but a cache .* needs 10.15 or later"):
        build(out)


def test_without_tensorrt_the_command_to_install_it_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(TensorRTError, match=r" install .*\[tensorrt\]'"):
        build(out)
