"""A session uses the native sampler if it is available, else the function, and reports which one."""

from __future__ import annotations

import _ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from msgspec.structs import replace

from tests.support.function_cases import Wanted, feeds, node_of, open_model, set_attribute
from tests.support.rows import random_case
from tests.support.samples import slow
from tests.support.toy_model import Toy, export
from topw_deploy.errors import ManifestError, ParameterError, ProviderError
from topw_deploy.manifest import (
    MANIFEST_NAME,
    DecoderManifest,
    Manifest,
    ModelFolder,
    describe_files,
    manifest_from_json,
    save_manifest,
)
from topw_deploy.plugins import library
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import graph_session, native
from topw_deploy.runtime.session import SessionOptions
from topw_deploy.sampling import TopWOptions

VARIABLE = "TOPW_NATIVE_LIBRARY"
TOY = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "export", TOY, with_mass=True)


def load(folder: Path, **settings: Any) -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", **settings)


def tokens(model: TopWModel) -> list[int]:
    return model.generate("hello", max_new_tokens=20, seed=3, temperature=1.7, lam=0.2).token_ids


def test_a_model_samples_natively_where_it_can_and_reports_it(native_library: Path, toy_folder: Path) -> None:
    model = load(toy_folder)
    assert model.sampler == "native"
    result = model.generate("a", max_new_tokens=2)
    assert (result.sampler, result.as_dict()["sampler"]) == ("native", "native")


def test_the_function_runs_on_request_and_draws_the_same(native_library: Path, toy_folder: Path) -> None:
    function, operator = load(toy_folder, sampler="graph"), load(toy_folder, sampler="native")
    assert (function.sampler, operator.sampler) == ("graph", "native")
    assert function.generate("a", max_new_tokens=1).sampler == "graph"
    assert tokens(function) == tokens(operator)


def test_another_choice_is_a_parameter_error(toy_folder: Path) -> None:
    with pytest.raises(ParameterError, match="sampler is 'fast', but must be one of auto, native, graph"):
        load(toy_folder, sampler="fast")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TOPW_NATIVE", "0", "TOPW_NATIVE=0 disables it"),
        slow("", "", "this installation was built without it"),
        slow(VARIABLE, "nowhere.so", f"{VARIABLE} is .*nowhere.so, which is not a file"),
        slow(VARIABLE, "broken.so", f"the native library of {VARIABLE}='.*broken.so' does not load"),
        (VARIABLE, _ctypes.__file__, f"of {VARIABLE}='.*_ctypes.* does not load .*is not a library of topw_deploy"),
    ],
)
def test_without_the_library_the_function_runs_and_the_reason_is_known(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF and nothing more")
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(Path(value).absolute()) if variable == VARIABLE else value)
    else:
        monkeypatch.setattr(library, "PACKAGED", tmp_path / "libtopw.so")
    model = load(toy_folder)
    assert model.sampler == "graph"
    assert model.generate("a", max_new_tokens=2).token_ids
    with pytest.raises(ProviderError, match=f"sampler='native' is not available: .*{reason}"):
        load(toy_folder, sampler="native")


def test_a_library_in_the_models_folder_or_the_working_folder_is_never_loaded(
    native_library: Path, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    for place in (folder, tmp_path):
        shutil.copy(native_library, place / native_library.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "elsewhere" / native_library.name)
    assert load(folder).sampler == "graph"


def change_graph(folder: Path, change: Any) -> None:
    model = onnx.load(folder / "model.onnx")
    change(model)
    onnx.save(model, folder / "model.onnx")
    manifest = load_manifest_of(folder)
    save_manifest(folder, manifest)


def load_manifest_of(folder: Path) -> Manifest:
    manifest = manifest_from_json((folder / MANIFEST_NAME).read_text())
    return replace(manifest, files={**manifest.files, **describe_files(folder, ["model.onnx"])})


@pytest.mark.slow
def test_a_node_that_the_operator_refuses_is_opened_again_with_the_function(
    native_library: Path, toy_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    change_graph(folder, lambda model: set_attribute(model, "table_form", "com.example.Lookup(bits=3)"))
    opened = graph_session.GraphSession(ModelFolder(folder, DecoderManifest), SessionOptions(provider="cpu"))
    assert opened.sampler == "graph"
    assert "the table form 'com.example.Lookup(bits=3)' is not known" in opened.why_graph
    assert tokens(load(folder)) == tokens(load(toy_folder, sampler="graph"))
    with pytest.raises(ProviderError, match=r"com.example.Lookup\(bits=3\)' is not known"):
        load(folder, sampler="native")


def test_other_providers_run_the_function(native_library: Path) -> None:
    found, why = native.operator_library("CoreMLExecutionProvider", "")
    assert (found, why) == (None, "the native sampler supports cpu and cuda, but the provider is coreml")


def test_an_invalid_graph_is_not_reported_as_the_samplers_error(toy_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    (folder / "model.onnx").write_bytes(b"not onnx")
    save_manifest(folder, load_manifest_of(folder))
    with pytest.raises(ManifestError, match="refuses"):
        load(folder, sampler="native")


def stored(name: str, array: np.ndarray) -> Callable[[onnx.ModelProto], None]:
    """A change of one of the sampler's initializers."""

    def change(model: onnx.ModelProto) -> None:
        (tensor,) = [t for t in model.graph.initializer if t.name == f"topw.{name}"]
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: set_attribute(model, "metric", "euclid"), "the metric euclid is not known"),
        (lambda model: set_attribute(model, "table_form", ""), "the table form '' is not known"),
        (lambda model: set_attribute(model, "table_form", "x" * 200), "table_form is too long"),
        (lambda model: set_attribute(model, "top_m", 0), "out of range"),
        (lambda model: set_attribute(model, "alt_iters", -1), "out of range"),
        (lambda model: set_attribute(model, "knn_k", -1), "out of range"),
        (stored("mean", np.zeros(3, np.float32)), "not of the shapes expected"),
        (stored("embedding", np.zeros((7, 8), np.float32)), "do not fit 300 tokens"),
        (stored("embedding", np.zeros((300, 8), np.int8)), "element type 3 is not known"),
        (stored("neighbour_bound", np.zeros(3, np.float32)), "do not fit 300 tokens"),
        (lambda model: node_of(model).input.__delitem__(slice(14, None)), "the node has 14 inputs"),
        (lambda model: node_of(model).input.append("topw.embedding"), "the node has 19 inputs"),
    ],
)
def test_a_node_that_the_operator_cannot_run_fails_when_the_session_opens(
    native_library: Path, change: Any, message: str
) -> None:
    model = Wanted().model()
    del model.functions[:]  # otherwise the runtime rejects the body first
    change(model)
    with pytest.raises(Exception, match=message):
        open_model(model, native_library)


def test_feeds_that_do_not_fit_each_other_fail_the_run(native_library: Path) -> None:
    wanted = Wanted()
    opened = open_model(wanted.model(), native_library)
    inputs = feeds([random_case(np.random.default_rng(0), wanted.vocab_size) for _ in range(3)], edits=2)
    for name in inputs:
        cut = inputs | {name: inputs[name][:2]}
        with pytest.raises(Exception, match=r"TopWSample: input \d+ does not have the shape"):
            opened.run(None, cut)
    with pytest.raises(Exception, match="TopWSample: input 2 does not have the shape"):
        opened.run(None, inputs | {"edit_penalty": inputs["edit_penalty"][:, :1]})


def test_session_options_serve_several_models_and_every_choice(native_library: Path, toy_folder: Path) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "0")
    choices = ("native", "native", "graph", "auto")
    models = [load(toy_folder, session_options=options, sampler=choice) for choice in choices]
    assert [model.sampler for model in models] == ["native", "native", "graph", "native"]
    assert len({tuple(tokens(model)) for model in models}) == 1
    assert options.get_session_config_entry("session.use_env_allocators") == "0"


def test_session_options_that_have_the_operator_already_are_taken(native_library: Path, toy_folder: Path) -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native_library))
    assert load(toy_folder, session_options=options).sampler == "native"
    assert load(toy_folder, session_options=options, sampler="graph").sampler == "graph"
