"""The Python plugin with emulated kernels; tests/nvidia has NVIDIA's parser and builder."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import COLUMNS, Kernel, KernelTable
from tests.support.masks import packed
from tests.support.native_cases import geometry_of
from topw_deploy.errors import PluginError
from topw_deploy.plugins import shared_library
from topw_deploy.plugins import tensorrt as plugins
from topw_deploy.plugins.shared_library import CUDA_ABI_VERSION, library_path
from topw_deploy.plugins.tensorrt.kernels import PluginKernels
from topw_deploy.plugins.tensorrt.node import CallShape, NodeAttributes
from topw_deploy.sampling.parameters import TopWOptions

VOCAB, HIDDEN, BATCH = 300, 8, 4
TABLE = np.random.default_rng(3).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
FULL = NodeAttributes(
    top_m=64, alt_iters=3, metric="unit", knn_k=0, table_form="Gather(axis=0)", with_mass=1, with_keep_mask=1
)  # fmt: skip
UNIFORM = NodeAttributes(top_m=64, alt_iters=3, metric="uniform", knn_k=0, with_mass=0, with_keep_mask=0)
ANSWERS = {"next_token": np.int64, "logprob": np.float32, "kept": np.int32, "certified": np.bool_, "mass": np.float32}


@pytest.fixture
def kernels(emulated_library: Path) -> PluginKernels:
    made = PluginKernels(emulated_library)
    emulate = made._kernel.handle.topw_emulate
    emulate.argtypes = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    emulate(1, 64, 3)
    return made


@pytest.fixture
def plugin(trt: Any) -> Any:
    return importlib.import_module("topw_deploy.plugins.tensorrt.plugin")


def arrays(settings: NodeAttributes) -> dict[str, np.ndarray]:
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
    if settings.has_table:
        geometry = geometry_of(TopWOptions(metric=settings.metric), TABLE)
        given |= {
            "mean": np.asarray(geometry.mean, np.float32), "inverse_std": np.asarray(geometry.inverse_std, np.float32),
            "neighbour_bound": np.zeros(0, np.float32), "table": TABLE,
        }  # fmt: skip
    return given


def cpus_answer(settings: NodeAttributes, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    path = library_path()
    if path is None:
        pytest.skip(f"no native sampler to compare with: {shared_library.why_absent()}")
    table = KernelTable(TABLE, given["mean"], given["inverse_std"]) if settings.has_table else None
    options = TopWOptions(top_m=settings.top_m, alt_iters=settings.alt_iters, metric=settings.metric)
    edits = (given["edit_ids"], given["edit_penalty"], given["edit_bias"])
    columns = {name: given[name] for name in COLUMNS}
    found = Kernel(path).sample(
        given["logits"], columns, options, table, edits, allowed=given["allowed"],
        rules=(given["rule"], given["rule_values"]), mass=True, keep_mask=True,
    )  # fmt: skip
    return {name: getattr(found, name) for name in settings.outputs}


@pytest.mark.parametrize("logits", ["float32", "float16"])
@pytest.mark.parametrize("settings", [FULL, UNIFORM], ids=["geometry", "uniform"])
def test_an_enqueued_step_answers_as_the_cpus_sampler(
    plugin: Any, kernels: PluginKernels, described: Any, settings: NodeAttributes, logits: str
) -> None:
    given = arrays(settings)
    given["logits"] = given["logits"].astype(logits)
    node = plugin.TopWSamplePlugin(settings, kernels).attach_to_context(None)
    inputs = [described(str(given[name].dtype), given[name].shape) for name in settings.inputs]
    node.on_shape_change(inputs, [])
    room = np.full(node.get_workspace_size(inputs, []) + 256, 0xA5, np.uint8)  # from another layer
    workspace = room.ctypes.data + -room.ctypes.data % 256
    answers = {name: np.zeros(BATCH, ANSWERS[name]) for name in settings.outputs if name != "keep_mask"}
    if settings.with_keep_mask:
        answers["keep_mask"] = np.zeros((BATCH, VOCAB), np.bool_)
    addresses = [given[name].ctypes.data for name in settings.inputs]
    for _ in range(2):
        node.enqueue(inputs, [], addresses, [answers[n].ctypes.data for n in settings.outputs], workspace, 0)
        for name, wanted in cpus_answer(settings, given).items():
            if wanted.dtype == np.float32:
                np.testing.assert_allclose(answers[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(answers[name], wanted, err_msg=name)
    assert not answers["certified"].all()
    assert (answers["kept"][[0, 1, 3]] > 1).all()
    assert (answers["kept"] < settings.top_m).all()


def test_outputs_have_the_types_and_shapes_of_the_contract(plugin: Any, trt: Any, kernels: PluginKernels) -> None:
    node = plugin.TopWSamplePlugin(FULL, kernels)
    assert node.num_outputs == 6
    kinds = node.get_output_data_types([trt.float32] * 18)
    assert kinds == [trt.int64, trt.float32, trt.int32, trt.bool, trt.float32, trt.bool]
    shapes = node.get_output_shapes([["batch", "vocab"]], [], None)
    assert shapes == [["batch"]] * 5 + [["batch", "vocab"]]
    assert plugin.TopWSamplePlugin(UNIFORM, kernels).num_outputs == 4


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
def test_logits_are_accepted_only_in_the_graphs_own_type(
    plugin: Any, trt: Any, kernels: PluginKernels, described: Any, given: str
) -> None:
    node = plugin.TopWSamplePlugin(UNIFORM, kernels)
    node.get_output_data_types([getattr(trt, given), trt.int64, *[trt.float32] * 12])
    node = node.clone()
    offered = [described(dtype, (1, 9)) for dtype in ("float32", "float16", "bfloat16", "int8")]
    taken = [node.supports_format_combination(0, [tensor], 1) for tensor in offered]
    assert taken == [dtype == given for dtype in ("float32", "float16", "bfloat16", "int8")]


def test_every_other_tensor_has_one_type_and_the_linear_format(
    plugin: Any, kernels: PluginKernels, described: Any
) -> None:
    node = plugin.TopWSamplePlugin(FULL, kernels)
    wanted = [
        "float32",
        "int64",
        "float32",
        "float32",
        "int32",
        *["float32"] * 7,
        "int32",
        *["float32"] * 5,
        "int64",
        "float32",
        "int32",
        "bool",
        "float32",
        "bool",
    ]
    tensors = [described(dtype, (1,)) for dtype in wanted]
    assert all(node.supports_format_combination(place, tensors, 18) for place in range(len(wanted)))
    others = [described("int32" if dtype != "int32" else "int64", (1,)) for dtype in wanted]
    assert not any(node.supports_format_combination(place, others, 18) for place in range(len(wanted)))
    strided = [described(dtype, (1,), "CHW2") for dtype in wanted]
    assert not any(node.supports_format_combination(place, strided, 18) for place in range(len(wanted)))


def test_a_node_that_the_kernels_refuse_is_refused_while_the_engine_is_built(
    plugin: Any, kernels: PluginKernels, described: Any
) -> None:
    node = plugin.TopWSamplePlugin(replace(UNIFORM, top_m=5000), kernels)
    shapes = [(1, 9000), (1, 1), (1, 1), (1, 1), (1, 0), *[(1,)] * 8, (1, 2)]
    inputs = [described("int64" if place == 1 else "float32", shape) for place, shape in enumerate(shapes)]
    with pytest.raises(PluginError, match="4096"):
        node.configure_plugin(inputs, [])
    logits = [described("int8", (1, 900)), *inputs[1:]]
    with pytest.raises(PluginError, match="logits are"):
        plugin.TopWSamplePlugin(UNIFORM, kernels).configure_plugin(logits, [])


@pytest.mark.parametrize(
    ("changes", "vocab", "hidden"),
    [
        ({"top_m": 4096}, 9000, 8), ({"top_m": 4097}, 9000, 8), ({"top_m": 4097}, 4096, 8), ({"knn_k": 16}, 99, 8),
        ({"knn_k": 17}, 99, 8), ({}, 524288, 8), ({}, 524289, 8), ({}, 99, 8192), ({}, 99, 8193),
    ],
)  # fmt: skip
def test_the_limits_known_without_the_library_are_the_librarys(
    kernels: PluginKernels, changes: dict[str, int], vocab: int, hidden: int
) -> None:
    settings = replace(FULL, **changes)
    call = CallShape(node=settings, batch=1, vocab=vocab, edits=1, logits_type="float32", tokens=vocab, hidden=hidden)
    if settings.exceeded_limit(vocab, hidden):
        with pytest.raises(PluginError, match="the kernels do not support this sampler"):
            kernels.check(call)
    else:
        kernels.check(call)


def test_an_engine_restores_the_plugin_that_it_was_built_with(plugin: Any, trt: Any, kernels: PluginKernels) -> None:
    plugin.register(kernels)
    (creator,) = trt.get_plugin_registry().all_creators
    assert {field.name for field in creator.field_names} == set(FULL.attribute_fields())
    kept = plugin.TopWSamplePlugin(FULL, kernels).get_fields_to_serialize()
    made = creator.create_plugin("topw_sample", kept, trt.TensorRTPhase.RUNTIME)
    assert made.node == FULL
    assert (made.plugin_name, made.plugin_version, made.plugin_namespace) == ("TopWSample", "1", "topw")


def test_an_engine_that_was_built_with_kernels_of_another_interface_is_refused(
    plugin: Any, trt: Any, kernels: PluginKernels
) -> None:
    """They might need more workspace than the engine reserves."""
    plugin.register(kernels)
    (creator,) = trt.get_plugin_registry().all_creators
    older = trt.PluginField("kernels", np.array([CUDA_ABI_VERSION - 1], np.int32), trt.PluginFieldType.INT32)
    attributes = plugin._plugin_fields(FULL.attribute_fields())
    for fields, found in (([*attributes, older], str(CUDA_ABI_VERSION - 1)), (attributes, "unknown")):
        said = rf"^the engine was built with version {found} of the kernels' interface, but \d+ is needed; build"
        with pytest.raises(PluginError, match=said):
            creator.create_plugin("topw_sample", fields, trt.TensorRTPhase.RUNTIME)
        assert creator.create_plugin("topw_sample", fields, trt.TensorRTPhase.BUILD).node == FULL


def test_registering_again_keeps_the_plugin_that_is_there(plugin: Any, trt: Any, kernels: PluginKernels) -> None:
    assert not plugins.registered()
    plugin.register(kernels)
    plugins.register()
    assert plugins.registered()
    assert len(trt.get_plugin_registry().all_creators) == 1


@pytest.mark.usefixtures("trt")
def test_without_the_cuda_library_the_plugin_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_CUDA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(PluginError, match="topw plugins build --cuda"):
        plugins.register()


def test_an_old_tensorrt_and_none_at_all_are_refused(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trt.__version__ = "10.2.1"
    with pytest.raises(PluginError, match=r"TensorRT 10\.2\.1 is installed, but 10\.3"):
        plugins.tensorrt_module()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(PluginError, match="cannot be imported"):
        plugins.tensorrt_module()
