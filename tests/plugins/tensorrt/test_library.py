"""The C++ plugin with emulated kernels, under AddressSanitizer with leak detection.

Compiled against stand-in headers, and NVIDIA's if TENSORRT_ROOT names them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.emulated import EMULATOR, FLAGS
from topw_deploy.plugins import compile_cuda, compile_native
from topw_deploy.plugins.tensorrt.compile import SOURCE, find_headers

from .test_plugin import BATCH, UNIFORM, VOCAB, arrays, cpus_answer

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ProgramRun = tuple[dict[str, int], Path, str]
ANSWERS = {"next_token": np.int64, "logprob": np.float32, "kept": np.int32, "certified": np.bool_}


def headers(kind: str) -> list[Path]:
    if kind == "stand-in":
        return [HERE / "stand_in"]
    root = os.environ.get("TENSORRT_ROOT")
    if not root:
        pytest.skip("TENSORRT_ROOT names no folder with TensorRT's headers")
    try:
        return [find_headers(Path(root))[0], compile_cuda.find_toolkit().headers]
    except compile_native.NotBuiltError as reason:
        pytest.skip(f"no headers of CUDA: {reason}")


def compiled(folder: Path, included: list[Path]) -> Path:
    """Only plugin_steps.cpp has sanitizers: they report fibres' stacks as errors."""
    command = [*compile_native.find_compiler(), *(flag for flag in FLAGS if flag != "-shared")]
    folders = [f"-isystem{path}" for path in included]
    parts = {
        "kernels_watched": (HERE / "kernels_watched.cpp", []),
        "emulator": (EMULATOR, []),
        "quantised": (compile_native.SOURCES / "quantised.cpp", []),
        "plugin": (SOURCE, [*SANITIZERS, *folders]),
        "plugin_steps": (HERE / "plugin_steps.cpp", [*SANITIZERS, *folders]),
    }
    for name, (source, flags) in parts.items():
        subprocess.run([*command, *flags, "-c", str(source), "-o", str(folder / f"{name}.o")], check=True)
    program = folder / "plugin_steps"
    objects = [str(folder / f"{name}.o") for name in parts]
    subprocess.run([*compile_native.find_compiler(), *SANITIZERS, *objects, "-o", str(program)], check=True)
    return program


def require_sanitizers(folder: Path) -> None:
    try:
        command = [*compile_native.find_compiler(), *SANITIZERS, "-x", "c++", "-", "-o", str(folder / "empty")]
    except compile_native.NotBuiltError as reason:
        pytest.skip(f"no emulated kernels: {reason}")
    done = subprocess.run(command, input="int main() {}", capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        pytest.skip(f"the compiler has no sanitizers: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="module", params=["stand-in", "NVIDIA"])
def program_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ProgramRun:
    """(The numbers that the program prints, by name; the file of its outputs; what it writes to stderr)."""
    folder = tmp_path_factory.mktemp("library")
    included = headers(request.param)
    require_sanitizers(folder)
    program = compiled(folder, included)
    given = arrays(UNIFORM)
    sizes = np.array([BATCH, VOCAB, given["edit_ids"].shape[1], given["allowed"].shape[1]])
    (folder / "inputs").write_bytes(b"".join(array.tobytes() for array in (sizes, *given.values())))
    done = subprocess.run(
        [program, folder / "inputs", folder / "outputs"], capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {name: int(value) for name, _, value in lines}, folder / "outputs", done.stderr


def test_an_enqueued_step_answers_as_the_cpus_sampler_in_every_context(program_run: ProgramRun) -> None:
    data, at = program_run[1].read_bytes(), 0
    wanted = cpus_answer(UNIFORM, arrays(UNIFORM))
    for _ in range(2):
        for name, dtype in ANSWERS.items():
            found = np.frombuffer(data, dtype, BATCH, at)
            at += found.nbytes
            np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert at == len(data)


def test_control_memory_is_allocated_once_for_a_context_and_kept(program_run: ProgramRun) -> None:
    found = program_run[0]
    assert (found["shape taken"], found["allocated by steps"], found["kept its address"]) == (1, 0, 1)
    assert (found["fewer rows taken"], found["fewer rows keep the address"]) == (1, 1)


def test_contexts_do_not_share_control_memory(program_run: ProgramRun) -> None:
    assert program_run[0]["contexts share memory"] == 0


def test_more_rows_get_other_memory_and_the_old_stays(program_run: ProgramRun) -> None:
    found = program_run[0]
    assert (found["more rows taken"], found["allocated for more rows"]) == (1, 1)
    assert (found["more rows have other memory"], found["released while contexts live"]) == (1, 0)


def test_a_caller_that_announces_no_shape_is_answered(program_run: ProgramRun) -> None:
    assert program_run[0]["no shape announced"] == 1


def test_a_full_device_logs_one_sentence_and_smaller_steps_still_run(program_run: ProgramRun) -> None:
    found, _, complaints = program_run
    assert (found["a full device refused"], found["smaller steps go on"]) == (1, 1)
    assert found["allocated on a full device"] == 0
    assert "TopWSample: no control memory for 300 rows: CUDA answers " in complaints
    assert complaints.count("no control memory") == 2  # shape and step


def test_an_engine_that_was_built_with_kernels_of_another_interface_is_refused(program_run: ProgramRun) -> None:
    found, _, complaints = program_run
    assert (found["engines of other kernels refused"], found["its own fields taken"]) == (1, 1)
    assert complaints.count("the engine was built for another version of the kernels' interface than") == 2


def test_control_memory_is_zero_after_every_step_and_freed_with_the_plugins(program_run: ProgramRun) -> None:
    assert (program_run[0]["control bytes left behind by a step"], program_run[0]["left"]) == (0, 0)
