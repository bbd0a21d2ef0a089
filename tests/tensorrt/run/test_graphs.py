"""Steps are captured once, launched without allocations, waits or pageable memory, and captured again for new shapes or
addresses."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.cuda_double import Gpu
from tests.support.tensorrt_double import Context, TensorRT
from tests.tensorrt.run.conftest import Open
from topw_deploy.device_lock import DeviceLock
from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel
from topw_deploy.tensorrt.cuda import CacheMemory, CudaDevice

LOCK = DeviceLock()
HOT: dict[str, Any] = {"temperature": 2.0, "lam": 0.3, "ignore_eos": True, "max_new_tokens": 20, "seed": 5}


def calls_of(gpu: Gpu, work: Any) -> Counter[str]:
    start = len(gpu.calls)
    work()
    return Counter(gpu.calls[start:])


def test_a_step_is_captured_after_one_that_warms_up(opened: Open, gpu: Gpu, trt: TensorRT) -> None:
    model = opened()
    calls = calls_of(gpu, lambda: model.generate("abc", **HOT))
    # 20 tokens: prompt, warm-up step, 18 from the graph
    assert (calls["cudaStreamBeginCapture"], calls["cudaGraphInstantiate"], calls["cudaGraphLaunch"]) == (1, 1, 18)
    decode = next(context for context in trt.contexts if context.profile == 0)
    assert decode.runs == 19
    assert model._session.why_no_graph == ""  # type: ignore[union-attr]


def test_a_later_generation_of_the_same_shape_launches_the_graph_at_once(opened: Open, gpu: Gpu) -> None:
    model = opened()
    first = model.generate("abc", **HOT)
    calls = calls_of(gpu, lambda: model.generate("a much longer prompt, in two", **{**HOT, "seed": 6}))
    assert (calls["cudaGraphInstantiate"], calls["cudaGraphLaunch"]) == (0, 19)
    assert not {name for name in calls if "Malloc" in name or "Free" in name}
    assert model.generate("abc", **HOT) == first


@pytest.mark.parametrize("edits", [{}, {"no_repeat_ngram_size": 3}])
def test_a_launched_step_is_one_launch_and_one_wait_beside_the_copies_of_edits(
    opened: Open, gpu: Gpu, edits: dict[str, int]
) -> None:
    model = opened()
    stream = model.stream("abc", **HOT, **edits)
    for _ in range(6):
        next(stream)
    calls = calls_of(gpu, lambda: next(stream))  # a character may take several steps
    steps = calls["cudaGraphLaunch"]
    assert steps >= 1
    launched = {"cudaSetDevice": steps, "cudaGraphLaunch": steps, "cudaStreamSynchronize": steps}
    assert calls == launched | ({"cudaMemcpyAsync": 3 * steps} if edits else {})
    assert gpu.pageable == 0


def test_other_shapes_and_more_slots_for_edits_are_captured_again(opened: Open, gpu: Gpu) -> None:
    model = opened()
    calls = calls_of(gpu, lambda: model.generate("abc", **{**HOT, "max_new_tokens": 60}, presence_penalty=1.0))
    assert calls["cudaGraphInstantiate"] == 3  # 16, 32 and 64 slots
    calls = calls_of(gpu, lambda: model.generate(["abc", "de"], **HOT))
    assert calls["cudaGraphInstantiate"] == 1
    assert len(gpu.graphs) == 1  # earlier ones are freed


def test_a_cache_that_moves_is_captured_again(opened: Open, gpu: Gpu, on_cpu: TopWModel) -> None:
    model = opened()
    model.generate("abc", **HOT)
    assert model._caches is not None
    kept = model._caches._pool
    assert kept is not None
    away = kept.borrow(1, 10, 10)  # another user's memory
    calls = calls_of(gpu, lambda: model.generate("abc", **HOT))
    assert calls["cudaGraphInstantiate"] == 1
    kept.give_back(away)
    assert model.generate("abc", **HOT).token_ids == on_cpu.generate("abc", **HOT).token_ids


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_prompts_leave_the_graph_alone_where_both_use_one_profile(opened: Open, gpu: Gpu, kind: str) -> None:
    model = opened(profile=kind)
    model.generate("abc", **HOT)
    calls = calls_of(gpu, lambda: model.generate("def", **HOT))
    assert (calls["cudaGraphInstantiate"], calls["cudaGraphLaunch"]) == (0, 19)


def test_a_stream_on_which_cuda_fails_is_not_used_again(opened: Open, gpu: Gpu, on_cpu: TopWModel) -> None:
    model = opened()
    stream = model.stream("abc", **HOT)
    next(stream)
    failed = (gpu.module.cudaError_t.cudaErrorInvalidValue,)
    wait, gpu.module.cudaStreamSynchronize = gpu.module.cudaStreamSynchronize, lambda stream: failed
    with pytest.raises(GenerationError, match=r"the engine failed at step \d+: CUDA failed in cudaStreamSynchronize"):
        list(stream)
    gpu.module.cudaStreamSynchronize = wait
    assert model._session._free == []  # type: ignore[union-attr]
    assert model.generate("abc", **HOT).token_ids == on_cpu.generate("abc", **HOT).token_ids


@pytest.mark.usefixtures("no_plugin")
def test_an_engine_with_branches_cannot_be_captured_and_runs_all_the_same(
    opened: Open, gpu: Gpu, trt: TensorRT, on_cpu: TopWModel
) -> None:
    trt.branches = True
    model = opened()
    assert model.sampler == "graph"
    assert model.generate("abc", **HOT).token_ids == on_cpu.generate("abc", **HOT).token_ids
    calls = calls_of(gpu, lambda: model.generate("abc", **HOT))
    assert "cudaStreamBeginCapture" not in calls  # not tried a third time
    assert gpu.count("cudaStreamBeginCapture") == 2
    assert model._session.why_no_graph.startswith("TensorRT does not accept the run")  # type: ignore[union-attr]


def test_a_capture_that_another_thread_spoils_is_tried_again(opened: Open, gpu: Gpu, on_cpu: TopWModel) -> None:
    model = opened()
    end, ended = gpu.module.cudaStreamEndCapture, []

    def spoiled_once(stream: Any) -> Any:
        stream.spoiled = not ended
        ended.append(stream)
        return end(stream)

    gpu.module.cudaStreamEndCapture = spoiled_once
    calls = calls_of(gpu, lambda: model.generate("abc", **HOT))
    assert (calls["cudaStreamBeginCapture"], calls["cudaGraphLaunch"]) == (2, 17)
    assert model._session.why_no_graph == ""  # type: ignore[union-attr]
    assert model.generate("abc", **HOT).token_ids == on_cpu.generate("abc", **HOT).token_ids


@pytest.mark.slow
def test_everything_is_freed_when_the_model_is_closed(opened: Open, gpu: Gpu) -> None:
    model = opened()
    model.generate(["abc", "a longer one"], **HOT)
    stream = model.stream("abc", **HOT)
    next(stream)
    del stream
    model.close()
    del model
    gc.collect()
    assert (gpu.device, gpu.pinned, gpu.streams, gpu.graphs) == ({}, {}, {}, {})


def test_memory_that_cannot_be_allocated_is_one_sentence(opened: Open, gpu: Gpu, on_cpu: TopWModel) -> None:
    model = opened()
    gpu.free_bytes, before = 100, gpu.free_bytes
    with pytest.raises(GenerationError, match=r"CUDA failed in cudaMalloc \(cudaErrorMemoryAllocation\)"):
        model.generate("abc", **HOT)
    gpu.free_bytes = before
    assert model.generate("abc", **HOT).token_ids == on_cpu.generate("abc", **HOT).token_ids


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("infer_shapes", RuntimeError("shapes\n  clash"), "does not accept these shapes: shapes clash"),
        ("set_input_shape", False, r"does not accept \w+ of shape \[.*\]: it gave no reason"),
        ("execute_async_v3", False, "does not accept the run"),
        ("set_optimization_profile_async", False, "does not accept the engine's profile 1"),
    ],
)
def test_what_tensorrt_refuses_is_one_sentence(
    opened: Open, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, message: str
) -> None:
    def refuse(self: Context, *arguments: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Context, method, refuse)
    with pytest.raises(GenerationError, match=f"^the engine failed at step 0: TensorRT {message}"):
        opened().generate("abc", **HOT)


def test_two_devices_in_one_thread_and_one_in_another_keep_their_memory_apart(gpu: Gpu, trt: TensorRT) -> None:
    gpu.devices = 2
    first, second = CudaDevice(LOCK, 0), CudaDevice(LOCK, 1)
    made = [CacheMemory(cuda, 1000) for cuda in (second, first, second)]
    with ThreadPoolExecutor(1) as other:
        made.append(other.submit(CacheMemory, second, 1000).result())
    assert [gpu.device_of[memory.pointer] for memory in made] == [1, 0, 1, 1]


def test_the_double_is_called_as_cuda_python_is() -> None:
    """cuda-python has the double's functions, with as many parameters."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")
    for name in dir(Gpu):
        if name.startswith("cuda"):
            signature = getattr(runtime, name).__doc__.strip().splitlines()[0]
            parameters = [p for p in signature.partition("(")[2].rpartition(")")[0].split(",") if p.strip()]
            assert len(parameters) == len(inspect.signature(getattr(Gpu, name)).parameters) - 1, signature
