"""ort_abi.h fits the installed onnxruntime.

A wrong slot may crash, so each test has its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.function_cases import Wanted, feeds, open_model, run
from tests.support.rows import random_case
from topw_deploy.plugins import compile_native

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

SAMPLE = """
import sys
import numpy as np, onnxruntime as ort

library, model, inputs, outputs = sys.argv[1:]
options = ort.SessionOptions()
options.log_severity_level = 3
options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
np.savez(outputs, **dict(zip(names, session.run(names, dict(np.load(inputs))))))
"""


def alone(code: str, *arguments: object) -> str:
    """Run `code` in a new interpreter; returns stdout."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_versions_errors_and_options_are_where_the_declarations_say(tmp_path: Path) -> None:
    try:
        compiler = compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))
    library = tmp_path / "libprobe.so"
    source = Path(__file__).with_name("abi_probe.cpp")
    command = [
        *compiler,
        *compile_native.FLAGS,
        "-shared",
        f"-I{compile_native.SOURCES}",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(alone(PROBE, library)) == [ort.__version__, "said and read back", 4, "yes"]


def test_a_node_with_everything_is_read_and_answered(native_library: Path, tmp_path: Path) -> None:
    """Every slot a kernel uses, with a batch for the runtime's threads."""
    wanted = Wanted(mass=True, keep_mask=True)
    rng = np.random.default_rng(0)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(16)], edits=2)
    (tmp_path / "model.onnx").write_bytes(wanted.model().SerializeToString())
    np.savez(tmp_path / "inputs.npz", **inputs)
    files = [tmp_path / name for name in ("model.onnx", "inputs.npz", "outputs.npz")]
    alone(SAMPLE, native_library, *files)
    found = dict(np.load(files[2]))
    here = run(open_model(wanted.model(), native_library), inputs)
    assert found.keys() == here.keys()
    for name, values in here.items():
        np.testing.assert_array_equal(found[name], values)
