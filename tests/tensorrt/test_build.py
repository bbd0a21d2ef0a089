"""Building an engine: TensorRT's configuration, the written files, and what a failed build leaves."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cuda_double import Gpu
from tests.support.tensorrt_double import TensorRT
from tests.tensorrt.conftest import CACHE
from topw_deploy.errors import TensorRTError
from topw_deploy.folders import atomic_file
from topw_deploy.plugins import library
from topw_deploy.progress import Progress
from topw_deploy.tensorrt.build import build_engine as build
from topw_deploy.tensorrt.check import BUILT_WITH
from topw_deploy.tensorrt.stamp import read_stamp


def written(out: Path) -> list[str]:
    folder = out / "engines"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_an_engine_lies_beside_a_stamp_that_says_what_it_is(trt: TensorRT, out: Path) -> None:
    built = build(out, max_batch=4, max_sequence=32, max_edits=64, workspace=1 << 20)
    stamp = read_stamp(built.path.with_suffix(".json"))
    assert stamp == built.stamp
    data = built.path.read_bytes()
    assert (stamp.size, stamp.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert stamp.manifest == hashlib.sha256((out / "topw_manifest.json").read_bytes()).hexdigest()
    assert (stamp.tensorrt, stamp.gpu, stamp.sm) == ("10.16.1.11", "Double GPU", 90)
    assert stamp.plugin == BUILT_WITH
    assert (stamp.cache_length, stamp.workspace) == (CACHE, 1 << 20)
    assert stamp.most == (4, 32, 64)
    assert written(out) == [f"double-gpu-sm90-tensorrt10.16.1.11.{end}" for end in ("engine", "json")]


def test_profiles_reach_tensorrt_with_every_input_and_the_caches_length(trt: TensorRT, out: Path) -> None:
    build(out, max_batch=4, max_sequence=32, max_edits=64)
    decode, prefill = (profile.shapes for profile in trt.configs[0].profiles)
    names = {spec["name"] for spec in json.loads((out / "topw_manifest.json").read_text())["inputs"]}
    assert set(decode) == set(prefill) == names
    assert decode["input_ids"] == [[1, 1], [4, 1], [4, 1]]
    assert prefill["input_ids"] == [[1, 1], [4, 32], [4, 32]]
    assert decode["edit_ids"] == prefill["edit_bias"] == [[1, 0], [4, 16], [4, 64]]
    assert decode["allowed"] == prefill["allowed"] == [[1, 9], [4, 9], [4, 9]]
    assert decode["uniform"] == [[1], [4], [4]]
    assert decode["past_key_values.0.key"] == [[1, 1, CACHE, 4], [4, 1, CACHE, 4], [4, 1, CACHE, 4]]


@pytest.mark.parametrize(("kind", "sequences"), [("decode", [1]), ("prefill", [CACHE]), ("both", [1, CACHE])])
def test_each_kind_of_profile_has_its_sequence_lengths(
    trt: TensorRT, out: Path, kind: str, sequences: list[int]
) -> None:
    stamp = build(out, profile=kind).stamp
    assert [profile.sequence.most for profile in stamp.profiles] == sequences
    assert {profile.edits.most for profile in stamp.profiles} == {CACHE}


def test_types_are_the_graphs_and_float32_is_not_rounded(trt: TensorRT, out: Path) -> None:
    build(out)
    assert (trt.networks[0].flags, trt.configs[0].flags) == (1 << 1, set())


def test_timings_are_read_and_written(trt: TensorRT, out: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    build(out, timing_cache=cache)
    assert cache.read_bytes() == b"10.16.1.11"
    cache.write_bytes(b"10.16.1.11 and more")
    build(out, timing_cache=cache)
    assert cache.read_bytes() == b"10.16.1.11 and more"
    assert list(tmp_path.glob(".*")) == []


def test_an_engine_is_not_built_into_a_folder_that_is_a_link(trt: TensorRT, out: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (out / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TensorRTError, match="engines is a symbolic link, but engines must be in the folder itself"):
        build(out)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_timings_of_another_machine_are_refused(trt: TensorRT, out: Path, tmp_path: Path) -> None:
    (tmp_path / "timings").write_bytes(b"10.15.0.1")
    with pytest.raises(TensorRTError, match=r"timings is from another GPU or TensorRT version; delete it"):
        build(out, timing_cache=tmp_path / "timings")
    with pytest.raises(TensorRTError, match="cannot be read or written: it is a folder, not a regular file"):
        build(out, timing_cache=tmp_path)


def test_a_build_without_the_plugin_is_refused_where_it_is_registered(trt: TensorRT, out: Path) -> None:
    with pytest.raises(TensorRTError, match="has already registered the sampler's plugin"):
        build(out, plugin="none")
    trt.registry.all_creators.clear()
    assert build(out, plugin="none").stamp.plugin == ""


@pytest.mark.usefixtures("no_plugin")
def test_auto_goes_on_with_the_function(trt: TensorRT, out: Path) -> None:
    lines: list[str] = []
    built = build(out, progress=Progress(say=lines.append))
    assert built.stamp.plugin == ""
    assert lines[0].endswith("the sampler as a function: the CUDA library is absent")


def test_a_plugins_library_is_loaded_and_must_hold_the_plugin(trt: TensorRT, out: Path, tmp_path: Path) -> None:
    trt.registry.all_creators.clear()
    good, other = tmp_path / "libtopw_cuda.so", tmp_path / "libother.so"
    for path in (good, other):
        path.touch()
    with pytest.raises(TensorRTError, match=r"libother.so has no plugin for the sampler's node; .*--cuda"):
        build(out, plugin=str(other))
    assert build(out, plugin=str(good)).stamp.plugin == BUILT_WITH
    assert trt.registry.libraries == [str(other), str(good)]
    trt.registry.all_creators.clear()
    with pytest.raises(TensorRTError, match=r"absent\.so is not a file; `topw plugins build --cuda` builds one"):
        build(out, plugin=str(tmp_path / "absent.so"))


def test_the_cuda_library_is_used_if_it_has_code_for_this_gpu(
    trt: TensorRT, gpu: Gpu, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt.registry.all_creators.clear()
    kernels = library.CudaLibrary.__new__(library.CudaLibrary)
    kernels.path, kernels.architectures = Path("/lib/libtopw_cuda.so"), (90,)
    monkeypatch.setattr(library, "library_path", lambda kind: kernels.path)
    monkeypatch.setattr(library, "load_cuda", lambda path: kernels)
    gpu.architecture = 87
    assert build(out).stamp.plugin == ""
    gpu.architecture = 90
    assert build(out).stamp.plugin == BUILT_WITH
    assert trt.registry.libraries == ["/lib/libtopw_cuda.so"]


def test_a_tensorrt_that_does_not_start_is_one_sentence(trt: TensorRT, out: Path) -> None:
    def broken(logger: Any) -> None:
        logger.log(trt.module.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    trt.module.Builder = broken
    with pytest.raises(TensorRTError, match=r"does not start here \(CUDA initialization failure with error: 35\)"):
        build(out)


def test_an_interrupt_while_building_leaves_the_earlier_engine(trt: TensorRT, out: Path) -> None:
    before = build(out).path.read_bytes()

    @contextlib.contextmanager
    def bar(total: int, unit: str) -> Iterator[Callable[[int], object]]:
        def interrupt(part: int) -> None:
            raise KeyboardInterrupt

        yield interrupt

    with pytest.raises(KeyboardInterrupt):
        build(out, max_batch=2, progress=Progress(bar=bar))
    (engine,) = out.glob("engines/*.engine")
    assert engine.read_bytes() == before
    assert len(written(out)) == 2
    assert read_stamp(engine.with_suffix(".json")).most[0] == 1


def test_a_build_that_fails_says_why_and_leaves_nothing(trt: TensorRT, out: Path) -> None:
    trt.fails = "no tactic\n  for node 7"
    with pytest.raises(TensorRTError, match=r"could not build an engine \(no tactic for node 7\); give smaller bounds"):
        build(out)
    assert written(out) == []


def test_a_graph_that_is_not_taken_is_an_error_with_the_parsers_words(trt: TensorRT, out: Path) -> None:
    trt.refuses = "no importer for Foo"
    with pytest.raises(TensorRTError, match=r"does not accept .*model.onnx \(no importer for Foo\); `topw check .*out"):
        build(out)
    assert written(out) == []


def test_a_new_engine_takes_the_place_of_the_old_one_of_the_same_machine(trt: TensorRT, gpu: Gpu, out: Path) -> None:
    build(out)
    assert build(out, max_batch=8).stamp.most[0] == 8
    assert len(written(out)) == 2
    gpu.name = "Another GPU"
    build(out)
    assert len(written(out)) == 4


@pytest.mark.parametrize("full_at", ["first piece", "second piece", "stamp", "timings"])
def test_a_full_disk_is_one_sentence_and_leaves_no_part_of_a_file(
    trt: TensorRT, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    replace_, pieces = os.replace, list[bytes]()

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith({"stamp": ".json", "timings": "timings"}.get(full_at, "no file")):
            raise OSError(28, "No space left on device")
        replace_(source, target)

    @contextmanager
    def fill(path: Path) -> Iterator[Any]:
        def write(data: bytes) -> None:
            pieces.append(data)
            if full_at == ("first piece", "second piece")[len(pieces) - 1]:
                raise OSError(28, "No space left on device")
            stream.write(data)

        with atomic_file(path) as stream:
            yield SimpleNamespace(write=write) if path.suffix == ".engine" else stream

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr("topw_deploy.tensorrt.build.atomic_file", fill)
    with pytest.raises(TensorRTError, match="cannot be read or written: No space left on device; make room"):
        build(out, timing_cache=tmp_path / "timings")
    names = [path.name for path in tmp_path.iterdir() if path.name != "out"]
    if full_at == "stamp":  # without one, the engine is not used
        assert (written(out), names) == (["double-gpu-sm90-tensorrt10.16.1.11.engine"], ["timings"])
    else:
        assert (written(out), names) == ([], [])
