"""Building examples/cpp: C declarations, onnxruntime versions, sanitizers, README and CMake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.cpp_host import (
    FORMS,
    ROOT,
    SOURCES,
    Host,
    answers_of,
    compiled,
    fails,
    host_of,
    ids_of,
    library_of,
    lines_of,
    native_library,
)
from tests.examples.test_cpp_host_requests import random_request
from tests.support.toy_model import VOCAB
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.long

OLDEST = "1.27.0"  # supported


def find_cmake() -> str | None:
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.is_file() else shutil.which("cmake")


def test_its_random_numbers_equal_the_published_table(host: Host) -> None:
    page = (ROOT / "docs" / "contract" / "random.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \d+ \| \d+ \| (0x[0-9a-f]{16}) \|", page, re.MULTILINE)
    source = (SOURCES / "random.h").read_text(encoding="utf-8")
    assert len(rows) == 11
    for word in rows:
        assert f"{word}}}" in source
    done = host("--self-test")
    assert (done.returncode, done.stdout) == (
        0,
        "self-test: 11 of 11 random numbers are those of docs/contract/random.md\n",
    )


def test_the_oldest_onnxruntime_fits_the_same_declarations(
    program: Path, host: Host, folders: dict[str, Path], demo_export: Path, pytestconfig: pytest.Config
) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = Path(pytestconfig.cache.mkdir("topw-onnxruntime")) / f"{OLDEST}-{python}"
    if not (place / "ready").is_file():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        home = {"HOME": os.path.expanduser(f"~{os.environ.get('USER', 'root')}")}  # for pip's settings
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--target", str(place), f"onnxruntime=={OLDEST}"],
            capture_output=True, text=True, env={**os.environ, **home},
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"pip cannot fetch onnxruntime {OLDEST}: {done.stderr.strip()[-200:]}")
        (place / "ready").touch()
    oldest = host_of(program, library_of(place / "onnxruntime"))
    given = ["--stats", "--seed", 7, "--max-new-tokens", 20, "--lam", 0.5, 50, 51, 52]
    for folder in (folders["concat"], folders["grouped"], demo_export):  # without TensorScatter, which is newer
        for library in ([], ["--native-library", native_library()]):
            done = oldest(folder, *given, *library)
            assert ids_of(done) == ids_of(host(folder, *given, *library))
            assert done.stderr.endswith(f"; onnxruntime {OLDEST}\n")


def test_the_vendors_header_has_the_same_declarations(
    folders: dict[str, Path], host: Host, ort_library: Path, tmp_path: Path
) -> None:
    """The compiler compares the positions."""
    header = os.environ.get("ONNXRUNTIME_INCLUDE_DIR")
    if not header:
        pytest.skip("no pip package brings onnxruntime_c_api.h; name its folder with ONNXRUNTIME_INCLUDE_DIR")
    with_it = compiled(tmp_path / "topw_host", "-O1", "-DTOPW_VENDOR_HEADER", "-isystem", header)
    for form in FORMS:
        given = [folders[form], "--seed", 4, "--max-new-tokens", 20, 50]
        assert ids_of(host_of(with_it, ort_library)(*given)) == ids_of(host(*given))


@pytest.mark.long
def test_sanitizers_find_no_error(
    folders: dict[str, Path], host: Host, ort_library: Path, tokenizers_library: Path, tmp_path: Path
) -> None:
    """Includes error paths."""
    try:
        checked = compiled(tmp_path / "topw_host", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler has no sanitizers: {error.stderr.strip()[-200:]}")
    run = host_of(checked, ort_library)
    assert "11 of 11" in run("--self-test").stdout
    for form in FORMS:
        given = [folders[form], "--seed", 4, "--max-new-tokens", 20, "--stats", "--lam", 0.5, 50, 51]
        assert ids_of(run(*given)) == ids_of(host(*given))
        rng = np.random.default_rng(9)
        given = [folders[form], "--batch", "--tokenizer-library", tokenizers_library]
        lines = lines_of([random_request(rng) | {"stop_strings": ["a", "é", "��"]} for _ in range(8)])
        assert answers_of(run(*given, stdin=lines)) == answers_of(host(*given, stdin=lines))
    fails(run(folders["concat"], VOCAB), 1)
    fails(run(folders["concat"], "--temperature", "-1"), 2)
    fails(run(folders["concat"], "--batch", stdin='{"prompt": [5], "logit_bias": {"5": "x"}}'), 1)
    for text in ("", '{"a": "\\ud83d\\ude00\\u00e9", "b": [1e5, tru', json.dumps({"format_version": 2}), "[" * 100):
        (tmp_path / MANIFEST_NAME).write_text(text, encoding="utf-8")
        fails(run(tmp_path, 5), 1)


@pytest.fixture(scope="session")
def cmake() -> str:
    found = find_cmake()
    if found is None:
        pytest.skip("there is no cmake; pip has it")
    return found


def test_the_commands_of_its_readme_run_and_draw_what_the_python_runtime_draws(
    cmake: str, demo_export: Path, tmp_path: Path
) -> None:
    page = (SOURCES / "README.md").read_text(encoding="utf-8")
    script = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert script.startswith("topw-export tiny out/demo\n")  # done by the fixture
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "demo").symlink_to(demo_export)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    native_library()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.split("\n", 1)[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
    )
    assert done.returncode == 0, done.stderr
    with TopWModel.from_pretrained(demo_export, provider="cpu") as model:
        tokens = model.generate("class Path", seed=7, max_new_tokens=12).token_ids
        text = model.generate("class Path", seed=2, lam=1.5, max_new_tokens=40).text
        penalised = model.generate([0], seed=8, repetition_penalty=1.2, max_new_tokens=12).token_ids
    assert [int(line) for line in re.findall(r"^\d+$", done.stdout, re.MULTILINE)] == tokens * 2
    assert text in done.stdout
    answers = sorted((json.loads(line) for line in re.findall(r"^\{.*\}$", done.stdout, re.M)), key=lambda a: a["row"])
    assert answers[0]["token_ids"] == tokens
    assert answers[1]["token_ids"] == penalised
    assert done.stderr.count("12 tokens after") == 1


def test_its_readme_shows_the_current_help(host: Host) -> None:
    shown = re.findall(r"^```text\n(.*?)^```$", (SOURCES / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert shown == [host("--help").stdout]


def test_cmake_builds_it_with_a_library_of_its_own(
    cmake: str, folders: dict[str, Path], host: Host, ort_library: Path, tmp_path: Path
) -> None:
    settings = {"ONNXRUNTIME_LIBRARY": ort_library, "ONNXRUNTIME_INCLUDE_DIR": "", "CMAKE_BUILD_TYPE": "Debug"}
    configure = [cmake, "-S", SOURCES, "-B", tmp_path, *(f"-D{name}={value}" for name, value in settings.items())]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run([cmake, "--build", tmp_path], check=True, capture_output=True)
    given = [folders["concat"], "--seed", 4, "--max-new-tokens", 20, 50]
    done = subprocess.run([str(tmp_path / "topw_host"), *map(str, given)], capture_output=True, text=True)
    assert ids_of(done) == ids_of(host(*given))
    shown = subprocess.run([str(tmp_path / "topw_host"), "--help"], capture_output=True, text=True).stdout
    assert str(ort_library) in shown


def test_onnxruntime_leaves_no_file_in_the_temporary_folder(
    program: Path, ort_library: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    host = host_of(program, ort_library, TMPDIR=str(tmp_path))
    assert len(ids_of(host(folders["concat"], "--max-new-tokens", 3, 50))) == 3
    assert list(tmp_path.iterdir()) == []
