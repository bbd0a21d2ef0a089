"""TensorRT's plugin with emulated kernels, under AddressSanitizer with leak detection.

tests/nvidia has NVIDIA's parser and builder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_kernel import CUDA_SOURCES, EMULATOR, FLAGS
from tests.support.kernel import COLUMNS, Kernel, KernelTable
from tests.support.rows import geometry_of, packed
from topw_deploy.plugins import compile_native
from topw_deploy.plugins.library import library_path, why_absent
from topw_deploy.sampling.parameters import TopWOptions

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
SOURCE = CUDA_SOURCES.with_name("tensorrt") / "topw_plugin.cpp"
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ProgramRun = tuple[dict[str, int], Path, str]
ANSWERS = {"next_token": np.int64, "logprob": np.float32, "kept": np.int32, "certified": np.bool_,
           "mass": np.float32, "keep_mask": np.bool_}  # fmt: skip
VOCAB, BATCH = 300, 4


def arrays(hidden: int) -> dict[str, np.ndarray]:
    """Inputs by name, with open, greedy and edited rows, all but the first masked, and a row with min-p."""
    rng = np.random.default_rng(5)
    given = {"logits": (rng.standard_normal((BATCH, VOCAB)) * 3).astype(np.float32)}
    given["edit_ids"] = np.array([[-1], [7], [-1], [-1]])
    given["edit_penalty"] = np.array([[1], [1.3], [1], [1]], np.float32)
    given["edit_bias"] = np.array([[0], [9], [0], [0]], np.float32)
    open_tokens = rng.random((BATCH, VOCAB)) < 0.7
    open_tokens[0], open_tokens[1, 7] = True, True
    given["allowed"] = packed(open_tokens)
    values = {"temperature": [1, 1, 0, 1], "lam": [0.6] * 4, "beta": [2.8] * 4, "init_top_p": [0.4] * 4,
              "selection_temperature": [0] * 4, "geom_scale": [1] * 4, "uniform": [0.1, 0.5, 0.7, 0.95]}  # fmt: skip
    given |= {name: np.array(values[name], np.float32) for name in COLUMNS}
    given["rule"] = np.array([0, 0, 9, 3], np.int32)
    given["rule_values"] = np.array([[0, 0], [0, 0], [0, 0], [0.05, 0]], np.float32)
    if hidden:
        table = rng.standard_normal((VOCAB, hidden)).astype(np.float32)
        geometry = geometry_of(TopWOptions(metric="unit"), table)
        given |= {
            "mean": np.asarray(geometry.mean, np.float32), "inverse_std": np.asarray(geometry.inverse_std, np.float32),
            "neighbour_bound": np.zeros(0, np.float32), "table": table,
        }  # fmt: skip
    return given


def cpus_answer(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    path = library_path()
    if path is None:
        pytest.skip(f"no native sampler to compare with: {why_absent()}")
    table = KernelTable(given["table"], given["mean"], given["inverse_std"]) if "table" in given else None
    options = TopWOptions(top_m=64, alt_iters=3, metric="uniform" if table is None else "unit")
    edits = (given["edit_ids"], given["edit_penalty"], given["edit_bias"])
    found = Kernel(path).sample(
        given["logits"], {name: given[name] for name in COLUMNS}, options, table, edits, allowed=given["allowed"],
        rules=(given["rule"], given["rule_values"]), mass=True, keep_mask=True,
    )  # fmt: skip
    return {name: getattr(found, name) for name in ANSWERS}


def compiled(folder: Path) -> Path:
    """Only plugin_steps.cpp has sanitizers: they report fibres' stacks as errors."""
    command = [*compile_native.find_compiler(), *(flag for flag in FLAGS if flag != "-shared"), f"-I{CUDA_SOURCES}"]
    plugin = [*SANITIZERS, f"-I{SOURCE.parent}", "-frtti"]
    parts = {
        "kernels_watched": (HERE / "kernels_watched.cpp", []),
        "emulator": (EMULATOR, []),
        "quantised": (compile_native.SOURCES / "quantised.cpp", []),
        "plugin": (SOURCE, plugin),
        "plugin_steps": (HERE / "plugin_steps.cpp", plugin),
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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    require_sanitizers(folder)
    return compiled(folder)


@pytest.fixture(scope="module", params=[0, 8], ids=["uniform", "geometry"])
def program_run(program: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ProgramRun:
    """(The numbers that the program prints, by name; the file of its outputs; what it writes to stderr)."""
    folder = tmp_path_factory.mktemp("library")
    given = arrays(request.param)
    sizes = np.array([BATCH, VOCAB, given["edit_ids"].shape[1], given["allowed"].shape[1], request.param])
    (folder / "inputs").write_bytes(b"".join(array.tobytes() for array in (sizes, *given.values())))
    done = subprocess.run(
        [program, folder / "inputs", folder / "outputs"], capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {"hidden": request.param} | {name: int(value) for name, _, value in lines}, folder / "outputs", done.stderr


def test_an_enqueued_step_answers_as_the_cpus_sampler_in_every_context(program_run: ProgramRun) -> None:
    data, at = program_run[1].read_bytes(), 0
    wanted = cpus_answer(arrays(program_run[0]["hidden"]))
    for _ in range(2):
        for name, dtype in ANSWERS.items():
            found = np.frombuffer(data, dtype, wanted[name].size, at).reshape(wanted[name].shape)
            at += found.nbytes
            np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert at == len(data)


def test_control_memory_is_of_one_context_and_grows_by_new_memory(program_run: ProgramRun) -> None:
    expected = {
        "shape taken": 1, "allocated by steps": 0, "kept its address": 1, "fewer rows taken": 1,
        "fewer rows keep the address": 1, "contexts share memory": 0, "more rows taken": 1,
        "allocated for more rows": 1, "more rows have other memory": 1, "released while contexts live": 0,
        "no shape announced": 1, "control bytes left behind by a step": 0, "left": 0,
    }  # fmt: skip
    assert {name: program_run[0][name] for name in expected} == expected


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
