"""Providers, and the options of sessions: which are taken, refused or fallen back from."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.ort import graph_session, providers
from topw_deploy.runtime.session import SessionKeywords, SessionOptions


@pytest.mark.parametrize("opened", [TopWModel, TopWSampler])
def test_the_signature_shows_every_option_of_a_session_with_its_default(opened: Any) -> None:
    shown = inspect.signature(opened.from_pretrained).parameters
    for option in fields(SessionOptions):
        assert shown[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[option.name].default == option.default
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in shown.values())
    assert set(SessionKeywords.__annotations__) == {option.name for option in fields(SessionOptions)}


def test_the_requested_provider_is_used(toy_folder: Path) -> None:
    model = TopWModel.from_pretrained(toy_folder, provider="cpu")
    assert model.provider == "CPUExecutionProvider"
    assert TopWModel.from_pretrained(toy_folder, provider="CPUExecutionProvider").provider == "CPUExecutionProvider"


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
def test_a_provider_that_is_not_built_in_is_an_error_with_the_remedy(toy_folder: Path) -> None:
    with pytest.raises(ProviderError, match=r"built without 'cuda': it has .*cpu; .* && .* install .*\[gpu\]'"):
        TopWModel.from_pretrained(toy_folder, provider="cuda")
    for fallback in (False, True):
        with pytest.raises(ProviderError, match="provider is 'nonsense', which is not an execution provider"):
            TopWModel.from_pretrained(toy_folder, provider="nonsense", allow_fallback=fallback)
    message = "cuda could not start, running on cpu: .* was built without 'cuda': .*pip install"
    with pytest.warns(RuntimeWarning, match=message):
        model = TopWModel.from_pretrained(toy_folder, provider="cuda", allow_fallback=True)
    assert model.provider == "CPUExecutionProvider"


@pytest.mark.parametrize("provider", ["cpu", "auto", "cuda", "tensorrt"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("abc", "provider_options is 'abc', but must be a mapping"),
        ({1: 2}, "provider_options is {1: 2}, but must be a mapping"),
        ({"device_id": "x"}, "device_id is 'x', but must be the number of a GPU"),
    ],
)
def test_options_of_providers_are_checked_before_anything_is_opened(
    toy_folder: Path, provider: str, options: Any, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        TopWModel.from_pretrained(toy_folder, provider=provider, provider_options=options)


@pytest.mark.parametrize("provider", [None, 3, ["cuda", "cpu"]])
def test_a_provider_is_a_name(toy_folder: Path, provider: Any) -> None:
    with pytest.raises(ParameterError, match=r"provider is .*, but must be a name such as 'auto'"):
        TopWModel.from_pretrained(toy_folder, provider=provider)


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
def test_cuda_graphs_that_nobody_captures_are_not_passed_over(toy_folder: Path) -> None:
    graphs = {"provider_options": {"enable_cuda_graph": "1"}}
    with pytest.raises(ParameterError, match="enable_cuda_graph is for provider='cuda', but provider is 'cpu'"):
        TopWModel.from_pretrained(toy_folder, provider="cpu", **graphs)
    with pytest.warns(RuntimeWarning, match="enable_cuda_graph is not used: running on cpu"):
        assert TopWModel.from_pretrained(toy_folder, **graphs).provider == "CPUExecutionProvider"


def test_a_provider_that_raises_is_named_and_the_graph_is_not_blamed(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ort.get_available_providers()
    monkeypatch.setattr(providers.ort, "get_available_providers", lambda: ["CUDAExecutionProvider", *built])
    opened = graph_session._new_session

    def broken(folder: Any, chain: list[Any], options: Any) -> Any:
        if chain[0][0] == "CUDAExecutionProvider":
            raise RuntimeError("CUDA failure 100: no CUDA-capable device")
        return opened(folder, chain, options)

    monkeypatch.setattr(graph_session, "_new_session", broken)
    with pytest.raises(ProviderError, match=r"cuda could not open .*no CUDA-capable device"):
        TopWModel.from_pretrained(toy_folder, provider="cuda")
    with pytest.warns(RuntimeWarning, match=r"cuda could not start, running on cpu: .*no CUDA-capable device"):
        TopWModel.from_pretrained(toy_folder, provider="cuda", allow_fallback=True)


def test_session_and_thread_options_reach_onnxruntime(toy_folder: Path) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = TopWModel.from_pretrained(
        toy_folder, provider="cpu", session_options=options, intra_op_num_threads=1, inter_op_num_threads=2
    )
    used = model._session.raw.get_session_options()  # type: ignore[union-attr]
    assert used.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert (used.intra_op_num_threads, used.inter_op_num_threads) == (1, 2)


@pytest.mark.parametrize("threads", [-1, 1.5, True, "2", 100_000])
def test_thread_counts_out_of_range_are_parameter_errors(toy_folder: Path, threads: Any) -> None:
    with pytest.raises(ParameterError, match="intra_op_num_threads is"):
        TopWModel.from_pretrained(toy_folder, provider="cpu", intra_op_num_threads=threads)
    with pytest.raises(ParameterError, match="session_options is a dict"):
        TopWModel.from_pretrained(toy_folder, provider="cpu", session_options={})
