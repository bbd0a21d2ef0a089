"""An engine is used if its stamp fits and its file is intact; else one sentence says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_double import Gpu
from tests.support.tensorrt_double import TensorRT
from topw_deploy.errors import TensorRTError
from topw_deploy.plugins import library
from topw_deploy.tensorrt.build import BuiltEngine, build_engine
from topw_deploy.tensorrt.stamp import EnginePlatform, find_fitting_engine, has_engines, read_stamp, this_platform

HERE = EnginePlatform("10.16.1.11", "Double GPU", 90)


@pytest.fixture
def built(trt: TensorRT, out: Path) -> BuiltEngine:
    return build_engine(out)


def rewrite(built: BuiltEngine, **changes: Any) -> None:
    path = built.path.with_suffix(".json")
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value != "absent"}))


def test_of_several_the_one_that_fits_is_found(trt: TensorRT, gpu: Gpu, built: BuiltEngine, out: Path) -> None:
    gpu.name, gpu.architecture = "A GPU with a name before the other's", 87
    other = build_engine(out)
    assert find_fitting_engine(out, HERE)[0] == built.path
    assert find_fitting_engine(out, this_platform("10.16.1.11"))[0] == other.path
    with pytest.raises(TensorRTError, match=r"was built for A GPU .*; .*was built for Double GPU .*; build one with"):
        find_fitting_engine(out, EnginePlatform("10.16.1.11", "Third GPU", 90))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (EnginePlatform("10.15.1", "Double GPU", 90), "was built by TensorRT 10.16.1.11, but this is 10.15.1"),
        (EnginePlatform("10.16.1.11", "Other", 90), r"was built for Double GPU \(sm_90\), but this is Other \(sm_90\)"),
        (EnginePlatform("10.16.1.11", "Double GPU", 87), r"was built for .* \(sm_90\), but this is .* \(sm_87\)"),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    built: BuiltEngine, out: Path, machine: EnginePlatform, message: str
) -> None:
    with pytest.raises(TensorRTError, match=rf"engines/double-gpu\S+ {message}; build one with `topw build-engine "):
        find_fitting_engine(out, machine)


def change_the_manifest(built: BuiltEngine) -> None:
    manifest = built.path.parents[1] / "topw_manifest.json"
    manifest.write_text(manifest.read_text() + "\n")


def cut_short(built: BuiltEngine) -> None:
    built.path.write_bytes(built.path.read_bytes()[:-1])


def alter(built: BuiltEngine) -> None:
    built.path.write_bytes(built.path.read_bytes()[:-1] + b"!")


def remove(built: BuiltEngine) -> None:
    built.path.unlink()


def replace_by_a_link(built: BuiltEngine) -> None:
    built.path.rename(built.path.with_name("elsewhere"))
    built.path.symlink_to(built.path.with_name("elsewhere"))


def with_stamp(put: Callable[[Path], Any]) -> Callable[[BuiltEngine], None]:
    """Put something else in the place of the stamp."""

    def change(built: BuiltEngine) -> None:
        path = built.path.with_suffix(".json")
        path.unlink()
        put(path)

    return change


ASCENDING = {"least": 1, "usual": 1, "most": 1}
DESCENDING = {"name": "x", "batch": {**ASCENDING, "least": 2}, "sequence": ASCENDING, "edits": ASCENDING}
MALFORMED = "is not an engine's stamp .*{}.*; build one with"
NO_FILE = r"is not an engine's stamp \(it is not a file in the folder\); build one with"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_the_manifest, "was built from another export than this folder's"),
        (cut_short, "does not have the SHA-256 of its stamp"),
        (alter, "does not have the SHA-256 of its stamp"),
        (remove, "is not a file in the folder"),
        (replace_by_a_link, "is not a file in the folder"),
        (partial(rewrite, sha256="absent"), MALFORMED.format("missing required field `sha256`")),
        (partial(rewrite, engine="../other.engine"), MALFORMED.format(r"matching regex .* - at `\$.engine`")),
        (
            partial(rewrite, profiles=[DESCENDING]),
            MALFORMED.format(r"2, 1, 1 is not ascending - at `\$.profiles\[0\].b"),
        ),
        (partial(rewrite, colour="red"), MALFORMED.format("unknown field `colour`")),
        (with_stamp(Path.mkdir), NO_FILE),
        (with_stamp(os.mkfifo), NO_FILE),
        (with_stamp(lambda path: path.symlink_to("/nowhere")), NO_FILE),
        (with_stamp(lambda path: path.symlink_to(__file__)), NO_FILE),
        (with_stamp(lambda path: None), r"^engines/double-gpu\S+ has no stamp, as after an interrupted build; build"),
    ],
)
def test_a_damaged_engine_or_stamp_is_refused(
    built: BuiltEngine, out: Path, damage: Callable[[BuiltEngine], Any], message: str
) -> None:
    damage(built)
    assert has_engines(out)
    with pytest.raises(TensorRTError, match=message):
        find_fitting_engine(out, HERE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"is not an engine's stamp \(Input data was truncated\)"),
        (b"[" * 100_000, r"is not an engine's stamp \(Expected `object`, got `array`\)"),
        (b" " * (1 << 20) + b"{}", "cannot be read: it has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_stamp_at_all_is_refused(built: BuiltEngine, out: Path, data: bytes, message: str) -> None:
    path = built.path.with_suffix(".json")
    path.write_bytes(data)
    with pytest.raises(TensorRTError, match=rf"{message}\.$"):
        read_stamp(path)
    with pytest.raises(TensorRTError, match="; build one with"):
        find_fitting_engine(out, HERE)


def test_a_gpu_that_is_not_there_is_named(trt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TensorRTError, match="device 1 was requested, but there are 1 GPUs"):
        this_platform("10.16.1.11", 1)
    monkeypatch.setattr(library, "query_driver", lambda: library.Driver(None, (), "there is no NVIDIA driver"))
    with pytest.raises(TensorRTError, match="there is no NVIDIA driver; see `topw doctor`"):
        this_platform("10.16.1.11")
