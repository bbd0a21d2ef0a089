"""The library and file on the oldest and the installed onnxruntime; ort_abi.h fits the installed one.

A wrong slot may crash, so each run of the library's operator has its own process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.function_cases import Wanted, clear_rows, feeds, open_model, run
from tests.support.rows import random_case
from topw_deploy.plugins import compile_native
from topw_deploy.sampling.parameters import TopWOptions

OLDEST = (1, 27)
CASES = {
    "cosine": Wanted(keep_mask=True),
    "mahalanobis-knn": Wanted(TopWOptions(top_m=60, potential="knn"), mass=True, keep_mask=True),
    "uniform": Wanted(TopWOptions(top_m=1200, metric="uniform"), keep_mask=True),
}

PROBE = """
import ctypes, json, sys
import onnxruntime as ort

options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
probe = ctypes.CDLL(sys.argv[1])
probe.probe_version.restype = probe.probe_message.restype = ctypes.c_char_p
entry = options.get_session_config_entry("topw.probe")
print(json.dumps([probe.probe_version().decode(), probe.probe_message().decode(), probe.probe_steps(), entry]))
"""

RUN = """
import sys
import numpy as np, onnxruntime as ort

library, model, inputs, outputs = sys.argv[1:]
options = ort.SessionOptions()
options.log_severity_level = 3
if library:
    options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
np.savez(outputs, version=ort.__version__, **dict(zip(names, session.run(names, dict(np.load(inputs))))))
"""


def alone(python: Path | str, code: str, *arguments: object) -> str:
    """Run `code` in a new interpreter; returns stdout."""
    done = subprocess.run([str(python), "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def run_alone(python: Path | str, library: Path | str, folder: Path) -> dict[str, np.ndarray]:
    """The outputs of `folder`'s model.onnx for its inputs.npz. library: "" for the function."""
    alone(python, RUN, library, *(folder / name for name in ("model.onnx", "inputs.npz", "outputs.npz")))
    return dict(np.load(folder / "outputs.npz"))


@pytest.fixture(scope="module")
def old_python(pytestconfig: pytest.Config) -> Path:
    """An interpreter with the oldest onnxruntime, cached."""
    folder = Path(pytestconfig.cache.mkdir("topw-oldest")) / f"{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "ready").is_file():
        version = _oldest_version()
        venv.create(folder, with_pip=True, clear=True)
        _pip(python, "install", "--only-binary=:all:", f"onnxruntime=={'.'.join(map(str, version))}", "numpy")
        (folder / "ready").touch()
    return python


def _oldest_version() -> tuple[int, ...]:
    """The oldest release from OLDEST on with a wheel, by pip's index."""
    listed = _pip(Path(sys.executable), "index", "versions", "onnxruntime", "--only-binary=:all:")
    found = re.search(r"Available versions: (.*)", listed)
    versions = [tuple(map(int, name.split("."))) for name in re.findall(r"\d+(?:\.\d+)+", found[1] if found else "")]
    if not [version for version in versions if version[:2] >= OLDEST]:
        pytest.skip(f"pip lists no onnxruntime from 1.27 on: {listed[:200]}")
    return min(version for version in versions if version[:2] >= OLDEST)


def _pip(python: Path, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    # Tests have an empty home; pip's settings may be in the real one.
    home = {"HOME": os.path.expanduser(f"~{_user()}")} if os.name == "posix" else {}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **home})
    if done.returncode != 0:
        pytest.skip(f"pip cannot fetch an old onnxruntime: {done.stderr.strip()[-200:]}")
    return done.stdout


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_crops_are_the_same_on_the_oldest_runtime_and_on_this_one(
    name: str, native_library: Path, old_python: Path, tmp_path: Path
) -> None:
    wanted = CASES[name]
    model, rng = wanted.model(), np.random.default_rng(7)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(48)], edits=2)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "inputs.npz", **inputs)
    found = {
        "function, here": run(open_model(model), inputs),
        "operator, here": run(open_model(model, native_library), inputs),
    }
    for title, library in (("function, oldest", ""), ("operator, oldest", str(native_library))):
        found[title] = run_alone(old_python, library, tmp_path)
    version = tuple(map(int, str(found["function, oldest"]["version"]).split(".")[:2]))
    assert OLDEST <= version <= tuple(map(int, ort.__version__.split(".")[:2]))
    clear = clear_rows(wanted, inputs)
    assert clear.sum() > 24
    expected = found["operator, here"]
    for title, outputs in found.items():
        for output in ("next_token", "kept", "certified", "keep_mask"):
            np.testing.assert_array_equal(outputs[output][clear], expected[output][clear], err_msg=f"{title}: {output}")
        np.testing.assert_allclose(outputs["logprob"][clear], expected["logprob"][clear], rtol=1e-5, atol=1e-5)


def test_versions_errors_and_options_are_where_the_declarations_say(tmp_path: Path) -> None:
    try:
        compiler = compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))
    library = tmp_path / "libprobe.so"
    source = Path(__file__).with_name("abi_probe.cpp")
    command = [*compiler, *compile_native.FLAGS, "-shared", f"-I{compile_native.SOURCES}", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, capture_output=True)
    assert json.loads(alone(sys.executable, PROBE, library)) == [ort.__version__, "said and read back", 4, "yes"]


def test_a_node_with_everything_is_read_and_answered(native_library: Path, tmp_path: Path) -> None:
    """Every slot a kernel uses, with a batch for the runtime's threads."""
    wanted = Wanted(mass=True, keep_mask=True)
    rng = np.random.default_rng(0)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(16)], edits=2)
    (tmp_path / "model.onnx").write_bytes(wanted.model().SerializeToString())
    np.savez(tmp_path / "inputs.npz", **inputs)
    found = run_alone(sys.executable, native_library, tmp_path)
    del found["version"]
    here = run(open_model(wanted.model(), native_library), inputs)
    assert found.keys() == here.keys()
    for name, values in here.items():
        np.testing.assert_array_equal(found[name], values)
