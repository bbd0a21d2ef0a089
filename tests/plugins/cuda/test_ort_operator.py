"""The CUDA provider's operator with emulated kernels, on the CPU provider."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_kernel import CUDA_SOURCES, compiled
from tests.support.function_cases import Wanted, clear_rows, feeds, open_model, run
from tests.support.rows import masks, packed, random_case, rules_of
from tests.support.rule_rows import rule_case
from topw_deploy.plugins import compile_native
from topw_deploy.sampling.parameters import METRICS, TopWOptions

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
OPERATOR = [compile_native.SOURCES / f"ort_{name}.cpp" for name in ("call", "node", "operator")]


@pytest.fixture(scope="session")
def operator_library(request: pytest.FixtureRequest) -> Path:
    try:
        compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(f"no emulated operator: {reason}")
    assert request.config.cache is not None
    sources = [HERE / "emulated_operator.cpp", CUDA_SOURCES / "ort_cuda.cpp", CUDA_SOURCES / "launch.cu", *OPERATOR]
    return compiled(
        request.config.cache.mkdir("emulated"),
        [*sources, compile_native.SOURCES / "quantised.cpp"],
        ["-DTOPW_WITH_CUDA=90"],
    )


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("mass", "keep_mask"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_node_is_answered_as_by_the_cpus_operator(
    operator_library: Path, native_library: Path, metric: str, mass: bool, keep_mask: bool
) -> None:
    wanted = Wanted(TopWOptions(top_m=40, metric=metric), mass=mass, keep_mask=keep_mask)  # type: ignore[arg-type]
    rng = np.random.default_rng(6)
    on_a_gpu, on_the_cpu = open_model(wanted.model(), operator_library), open_model(wanted.model(), native_library)
    for rows, edits in ((1, 0), (5, 2), (3, 17), (12, 1), (1, 0)):  # memory for more rows serves fewer
        inputs = feed(wanted, rng, rows, edits)
        if edits % 2:
            inputs["allowed"] = packed(masks(rng, rows, wanted.vocab_size))
            inputs["rule"], inputs["rule_values"] = rules_of([rule_case(rng, 1) for _ in range(rows)])
        found, expected = run(on_a_gpu, inputs), run(on_the_cpu, inputs)
        assert list(found) == list(expected)
        clear = clear_rows(wanted, inputs)
        for name, values in found.items():
            assert values.dtype == expected[name].dtype
            np.testing.assert_allclose(values[clear], expected[name][clear], rtol=1e-5, atol=1e-6, err_msg=name)


def feed(wanted: Wanted, rng: np.random.Generator, rows: int, edits: int) -> dict[str, np.ndarray]:
    """Random rows, with edits that change no logit."""
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(rows)], edits)
    inputs["edit_ids"] = np.stack([rng.permutation(wanted.vocab_size)[:edits] for _ in range(rows)]).astype(np.int64)
    return inputs


def test_threads_that_run_one_session_wait_for_each_others_launches(operator_library: Path) -> None:
    """The emulator runs one launch at a time, like a stream."""
    wanted = Wanted(mass=True)
    session, rng = open_model(wanted.model(), operator_library), np.random.default_rng(7)
    given = [feed(wanted, rng, 6, 2) for _ in range(8)]
    alone = [run(session, inputs) for inputs in given]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda inputs: run(session, inputs), given))
    for found, expected in zip(together, alone, strict=True):
        for name, values in expected.items():
            assert np.array_equal(found[name], values), name


def test_feeds_that_do_not_fit_fail_the_run(operator_library: Path) -> None:
    wanted = Wanted()
    session, inputs = open_model(wanted.model(), operator_library), feed(wanted, np.random.default_rng(0), 3, 2)
    with pytest.raises(Exception, match="input 2 does not have the shape or type"):
        run(session, {**inputs, "edit_penalty": np.ones((3, 1), np.float32)})
    with pytest.raises(Exception, match="allowed has 9 words per row, but must have 0 or 10 for 300 tokens"):
        run(session, {**inputs, "allowed": np.full((3, 9), -1, np.int32)})
    with pytest.raises(Exception, match="input 11 does not have the shape or type"):
        run(session, {**inputs, "uniform": np.zeros(2, np.float32)})


def test_a_node_that_the_kernels_refuse_does_not_open(operator_library: Path, native_library: Path) -> None:
    wanted = Wanted(TopWOptions(top_m=5000, metric="uniform"), vocab_size=6000)
    open_model(wanted.model(), native_library)
    with pytest.raises(Exception, match="TopWSample: top_m is larger than 4096"):
        open_model(wanted.model(), operator_library)


Find = Callable[..., tuple[int, int, int] | None]


@pytest.fixture
def find(request: pytest.FixtureRequest) -> Iterator[Find]:
    """A function (batch, edits, vocab, stream) -> (workspace address, most rows, most edits); None if out of memory."""
    assert request.config.cache is not None
    library = ctypes.CDLL(str(compiled(request.config.cache.mkdir("emulated"), [HERE / "device_workspaces.cpp"])))
    library.probe_create.restype = library.probe_find.restype = ctypes.c_void_p
    all_ = ctypes.c_void_p(library.probe_create())

    def call(batch: int, edits: int = 0, vocab: int = 7, stream: int = 1) -> tuple[int, int, int] | None:
        rows, slots = ctypes.c_int64(), ctypes.c_int64()
        sizes = (ctypes.c_int64(batch), ctypes.c_int64(edits), ctypes.c_int64(vocab), ctypes.c_ssize_t(stream))
        address = library.probe_find(all_, *sizes, ctypes.byref(rows), ctypes.byref(slots))
        return None if address is None else (address, rows.value, slots.value)

    yield call
    library.probe_destroy(all_)


def test_a_workspace_serves_every_call_that_it_holds_and_no_other_streams(find: Find) -> None:
    first = find(4, edits=16)
    assert first is not None
    assert first[1:] == (4, 16)
    assert find(1) == find(4, edits=3) == find(4, edits=16) == first
    assert find(4, edits=16, stream=2) != first
    assert find(4, edits=16, vocab=8) != first
    assert first[0] % 256 == 0


def test_a_larger_call_gets_at_least_twice_as_much_and_leaves_the_other_workspace_alone(find: Find) -> None:
    first = find(4, edits=16)
    assert first is not None
    grown = find(5, edits=16)
    assert grown is not None
    assert grown[1:] == (8, 16)
    assert find(8, edits=16) == grown
    wider = find(2, edits=17)
    assert wider is not None
    assert wider[1:] == (8, 32)
    ctypes.memset(first[0], 1, 4096)
    ctypes.memset(grown[0], 1, 4096)
    assert find(60) is not None
    last = find(61)
    assert last is not None
    assert last[1] == 61  # 120 rows are refused


def test_control_words_are_zero_at_first(find: Find) -> None:
    for size in (1, 3, 9, 27):
        found = find(size)
        assert found is not None
        assert ctypes.string_at(found[0], 256) == bytes(256)
        ctypes.memset(found[0], 255, 4096)


def test_memory_that_cannot_be_allocated_fails_only_its_call(find: Find) -> None:
    small = find(2)
    assert find(2, edits=2000) is None
    assert find(2) == small
