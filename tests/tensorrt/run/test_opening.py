"""`provider="tensorrt"`: an engine, onnxruntime's provider or an error."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from tests.support.cuda_double import Gpu
from tests.support.tensorrt_double import TensorRT
from tests.tensorrt.run.conftest import Open
from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.plugins import library
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import providers
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.session import SessionOptions
from topw_deploy.tensorrt.build import build_engine
from topw_deploy.tensorrt.check import BUILT_WITH
from topw_deploy.tensorrt.run import TensorRTSession


def load(out: Path, provider: str = "tensorrt", **settings: Any) -> TopWModel:
    return TopWModel.from_pretrained(out, provider=provider, **settings)


@pytest.fixture
def with_tensorrt_in_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns requested providers; sessions use the CPU."""
    asked: list[str] = []
    built = ["TensorrtExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: built)
    original = GraphSession.__init__

    def opened(self: GraphSession, folder: Any, options: SessionOptions) -> None:
        asked.append(options.provider)
        original(self, folder, replace(options, provider="cpu"))

    monkeypatch.setattr(GraphSession, "__init__", opened)
    return asked


def test_a_fitting_engine_runs_the_model(opened: Open) -> None:
    model = opened()
    assert isinstance(model._session, TensorRTSession)
    assert model.provider == "tensorrt"
    assert repr(model).endswith("toy, tensorrt)")
    assert model.cache_bytes == 0


def test_without_an_engine_the_command_to_build_one_is_named(out: Path, trt: TensorRT) -> None:
    message = r"no engine to run and this onnxruntime has no TensorRT: .*out has no engine; build one with `topw build-"
    with pytest.raises(ProviderError, match=message) as caught:
        load(out)
    assert str(caught.value).count("topw build-engine") == 1


def missing_plugin(out: Path, gpu: Gpu, trt: TensorRT) -> None:
    trt.registry.all_creators.clear()


def other_plugin(out: Path, gpu: Gpu, trt: TensorRT) -> None:
    (stamp,) = out.glob("engines/*.json")
    stamp.write_text(stamp.read_text().replace(f'"plugin": "{BUILT_WITH}"', '"plugin": "1.1"'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing_plugin, "needs version .* of the sampler's plugin, but the CUDA library is absent; build it again"),
        (other_plugin, f"needs version 1.1 of the sampler's plugin, but this is version {BUILT_WITH}; build it again"),
    ],
)
def test_an_engine_that_does_not_fit_is_one_sentence_that_says_how_to_rebuild(
    out: Path, gpu: Gpu, trt: TensorRT, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    build_engine(out)
    change(out, gpu, trt)
    if change is missing_plugin:
        monkeypatch.setattr(library, "library_path", lambda kind: None)
        monkeypatch.setattr(library, "why_absent", lambda kind: "the CUDA library is absent")
    with pytest.raises(ProviderError, match=message) as caught:
        load(out)
    assert str(caught.value).count("topw build-engine") == 1
    assert trt.contexts == []


def test_bytes_that_tensorrt_does_not_open_are_one_sentence(out: Path, trt: TensorRT) -> None:
    built = build_engine(out)
    built.path.write_bytes(b"{" * built.stamp.size)
    stamp = built.path.with_suffix(".json")
    stamp.write_text(stamp.read_text().replace(built.stamp.sha256, hashlib.sha256(built.path.read_bytes()).hexdigest()))
    with pytest.raises(ProviderError, match=r"TensorRT cannot open .*\.engine \(the plan is no plan\)"):
        load(out)


def test_a_warning_names_an_engine_that_does_not_fit_if_onnxruntime_runs_instead(
    out: Path, gpu: Gpu, trt: TensorRT, with_tensorrt_in_onnxruntime: list[str]
) -> None:
    build_engine(out)
    gpu.name = "Another GPU"
    with pytest.warns(RuntimeWarning, match="TensorRT provider runs instead of an engine: .* was built for Double"):
        load(out)
    assert with_tensorrt_in_onnxruntime == ["tensorrt"]


@pytest.mark.parametrize("name", ["TensorrtExecutionProvider", "tensorrtexecutionprovider"])
def test_the_full_name_is_onnxruntimes_provider_even_beside_an_engine(
    out: Path, trt: TensorRT, with_tensorrt_in_onnxruntime: list[str], name: str
) -> None:
    build_engine(out)
    load(out, name)
    assert with_tensorrt_in_onnxruntime == [name]


def test_the_rtx_provider_goes_by_the_name_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ["NvTensorRTRTXExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: built)
    assert providers.resolve("nv_tensorrt_rtx") == providers.resolve("NvTensorRTRTXExecutionProvider") == built[0]


def test_the_cpu_runs_instead_only_where_that_is_allowed(out: Path) -> None:
    with pytest.raises(ProviderError):
        load(out)
    with pytest.warns(RuntimeWarning) as warned:
        assert load(out, allow_fallback=True).provider == "CPUExecutionProvider"
    first, second = (str(each.message) for each in warned)
    assert first.startswith("there is no engine to run: ")
    assert second.startswith("tensorrt could not start, running on cpu: this onnxruntime ")


@pytest.mark.parametrize(("asked", "kept"), [("auto", "plugin"), ("native", "plugin")])
def test_the_sampler_is_the_one_the_engine_was_built_with(opened: Open, asked: str, kept: str) -> None:
    assert opened({"sampler": asked}).sampler == kept
    with pytest.raises(ProviderError, match=r"sampler is 'graph', but the engine was built with the plugin; .*none"):
        opened({"sampler": "graph"})


@pytest.mark.usefixtures("no_plugin")
def test_an_engine_without_the_plugin_runs_the_function(opened: Open) -> None:
    model = opened({"sampler": "graph"})
    assert (model.sampler, model._session.why_graph) == (  # type: ignore[union-attr]
        "graph",
        "the engine was built without the plugin",
    )
    with pytest.raises(ProviderError, match=r"sampler is 'native', but the engine was built without the plugin"):
        opened({"sampler": "native"})


@pytest.mark.parametrize(
    "settings",
    [
        {"intra_op_num_threads": 1},
        {"inter_op_num_threads": 1},
        {"session_options": ort.SessionOptions()},
        {"provider_options": {"trt_fp16_enable": True}},
    ],
)
def test_options_of_onnxruntime_are_refused_where_an_engine_runs(opened: Open, settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=rf"{next(iter(settings))} is for onnxruntime, and the engine"):
        opened(settings)


def test_a_gpu_may_be_chosen_by_number(opened: Open) -> None:
    assert opened({"provider_options": {"device_id": 0}}).provider == "tensorrt"
    with pytest.raises(ProviderError, match="device 2 was requested, but there are 1 GPUs"):
        opened({"provider_options": {"device_id": "2"}})
    with pytest.raises(ParameterError, match="device_id is '-1', but must be the number of a GPU"):
        opened({"provider_options": {"device_id": -1}})


def test_a_device_without_room_is_one_sentence(out: Path, gpu: Gpu, trt: TensorRT) -> None:
    build_engine(out)
    gpu.free_bytes = 0
    message = r"\.engine cannot be opened: CUDA failed in cudaMallocHost .*; build one with"
    with pytest.raises(ProviderError, match=message):
        load(out)
