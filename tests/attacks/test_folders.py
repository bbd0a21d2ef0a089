"""Exported folders that must be refused, and code in them that must never run.

Also tokenizers that stall. Links, pipes, sockets and devices: tests/runtime/test_special_files.py. Damaged side files:
tests/runtime/test_loading.py, `make fuzz-loaders`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.attacks import OTHERS, SPECIAL, call, claim, function, nested_if, put, refused, sparse
from tests.support.samples import thinned
from tests.support.toy_model import byte_tokenizer
from topw_deploy.errors import ManifestError, TokenizerError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.graph_session import refuse_compiled
from topw_deploy.runtime.tokenizer import Tokenizer

Change = Callable[[onnx.ModelProto], object]


def rewrite(folder: Path, change: Change) -> Path:
    model = onnx.load(folder / "model.onnx")
    change(model)
    return put(folder, "model.onnx", model.SerializeToString())


def point_outside(location: str, offset: str = "0", length: str = "16") -> Change:
    """Make an initializer point to another file."""

    def change(model: onnx.ModelProto) -> None:
        tensor = next(each for each in model.graph.initializer if each.dims)
        tensor.data_location = TensorProto.EXTERNAL
        for kind in ("raw_data", "float_data", "int64_data", "int32_data"):
            tensor.ClearField(kind)
        tensor.ClearField("external_data")
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    return change


def set_shape(*sizes: int, external: bool = False) -> Change:
    """Change the sizes of an initializer that the graph uses. external: one in another file."""

    def change(model: onnx.ModelProto) -> None:
        found = (each for each in model.graph.initializer if each.dims)
        tensor = next(each for each in found if (each.data_location == TensorProto.EXTERNAL) == external)
        del tensor.dims[:]
        tensor.dims.extend(sizes)

    return change


def add_node(op_type: str, domain: str = "", **attributes: object) -> Change:
    """Add a node that reads input_ids."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(
            helper.make_node(op_type, ["input_ids"], ["of the attacker"], domain=domain, **attributes)
        )
        if domain and all(each.domain != domain for each in model.opset_import):
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return change


GRAPHS: dict[str, Change] = {
    "data above the folder": point_outside("../secret"),
    "data at an absolute path": point_outside("/etc/passwd"),
    "data in a device": point_outside("/dev/zero"),
    "data beyond the file": point_outside("model.onnx", str(1 << 40)),
    "an operator of nobody": add_node("Run", "evil"),
    "2**124 elements": set_shape(1 << 62, 1 << 62),
    "more elements than bytes": set_shape(1 << 20),
}


APPENDED = {
    "If within If": nested_if(300),
    "a function that calls itself": function("f", ["f"]) + call("f"),
    "a field longer than the file": b"\x3a\xff\xff\xff\xff\x07",
}


@pytest.mark.parametrize("name", APPENDED)
def test_an_endless_graph_is_refused(folder: Path, name: str) -> None:
    """Protobuf merges what is appended with the model."""
    put(folder, "model.onnx", (folder / "model.onnx").read_bytes() + APPENDED[name])
    with refused(ManifestError, r"onnxruntime .* refuses .*model\.onnx"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("name", thinned(GRAPHS, 2))
def test_a_graph_that_names_other_files_or_overflows_is_refused(folder: Path, name: str) -> None:
    rewrite(folder, GRAPHS[name])
    (folder.parent / "secret").write_bytes(bytes(16))
    with refused(ManifestError, r"onnxruntime .* refuses .*model\.onnx|must have"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", [*SPECIAL, "a link to a file outside"])
def test_external_data_in_a_special_file_or_behind_a_link_is_refused(folder: Path, kind: str) -> None:
    """onnxruntime opens the graph's weights itself, and only regular files."""
    rewrite(folder, point_outside("weights", length="2"))
    {**SPECIAL, **OTHERS}[kind](folder / "weights")
    with refused(ManifestError, r"onnxruntime .* refuses .*model\.onnx"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize(
    ("name", "size", "most"),
    [
        ("tokenizer.json", 1 << 40, 256 << 20),
        ("config.json", 1 << 30, 16 << 20),
        ("generation_config.json", 1 << 30, 16 << 20),
    ],
)  # fmt: skip
def test_a_file_far_too_large_is_not_read(folder: Path, name: str, size: int, most: int) -> None:
    sparse(folder / name, size)
    claim(folder, name, size)
    with refused(ManifestError, rf"{name} has {size} bytes, but may have at most {most}"):
        TopWModel.from_pretrained(folder, provider="cpu")


def test_compiled_code_of_another_tool_is_refused(folder: Path) -> None:
    """TensorRT's, QNN's and OpenVINO's providers would load what such a node holds or names."""
    refuse_compiled(ModelFolder(folder, DecoderManifest))
    rewrite(folder, add_node("EPContext", "com.microsoft", embed_mode=0, ep_cache_context="evil.engine"))
    with refused(ManifestError, r"has an EPContext node, which runs code compiled elsewhere"):
        refuse_compiled(ModelFolder(folder, DecoderManifest))
    with refused(ManifestError, "refuses"):
        TopWModel.from_pretrained(folder, provider="cpu")


# Opens and runs the folder, then prints which of its files are mapped as code, and which Python modules it brought.
LOAD = """
import sys
from topw_deploy.errors import TopWError
from topw_deploy.runtime import TopWModel
folder = sys.argv[1]
def load(opened):
    with TopWModel.from_pretrained(opened, provider="cpu") as model:
        model.generate("a", max_new_tokens=1)
        model.chat([{"role": "user", "content": "x"}], max_new_tokens=1)
load(folder)
import os
os.chdir(folder)
load(".")
code = {line.split()[-1] for line in open("/proc/self/maps") if folder in line and "x" in line.split()[1]}
brought = {name for name, module in sys.modules.items() if folder in str(getattr(module, "__file__", ""))}
print("loaded", sorted(code), sorted(brought))
"""
NAMES = ("libtopw.so", "libtopw_cuda.so", "custom_ops.so", "plugins/libtopw.so", "onnxruntime_extensions.so")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_folder_never_makes_the_process_load_its_code(folder: Path, tmp_path: Path) -> None:
    """Files that name libraries in every way that some runtime honours, also from within the folder."""
    from topw_deploy.plugins.library import library_path

    library, witness = library_path(), tmp_path / "witness"
    content = Path(library).read_bytes() if library is not None else b"\x7fELF" + bytes(60)
    for name in NAMES:
        put(folder, name, content)
    code = f"open({str(witness)!r}, 'w')\n"
    for name in ("modeling_toy.py", "tokenization_toy.py", "__init__.py", "sitecustomize.py", "jinja2.py", "topw.py"):
        put(folder, name, code)
    options = {"custom_ops_library": "custom_ops.so", "session.custom_op_libraries": "custom_ops.so"}
    put(folder, "genai_config.json", json.dumps({"model": {"decoder": {"session_options": options}}}))
    auto = {"AutoModelForCausalLM": "modeling_toy.Toy", "AutoTokenizer": ["tokenization_toy.Toy", None]}
    put(folder, "config.json", json.dumps({"model_type": "toy", "auto_map": auto, "custom_ops_library": "libtopw.so"}))
    put(folder, "tokenizer_config.json", json.dumps({"auto_map": auto, "tokenizer_class": "tokenization_toy.Toy"}))

    def session_options(model: onnx.ModelProto) -> None:
        stated = {"session_options": {"inter_op_num_threads": 1, "custom_ops_library": str(folder / "custom_ops.so")}}
        helper.set_model_props(model, {"ort_config": json.dumps(stated), "ep_library": "custom_ops.so"})

    rewrite(folder, session_options)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1:] == ["loaded [] []"], done.stderr[-3000:]
    assert not witness.exists()


def open_changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    data = json.loads(byte_tokenizer().to_str())
    change(data)
    put(folder, "tokenizer.json", json.dumps(data))
    return Tokenizer(ModelFolder(folder, DecoderManifest))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+b"])
def test_an_expression_that_backtracks_without_end_is_stopped(folder: Path, pattern: str) -> None:
    """Oniguruma gives up after ten million steps at one place."""

    def change(data: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}

    tokenizer = open_changed(folder, change)
    with refused(TokenizerError, "cannot be used"):
        tokenizer.encode("a" * 5000 + "!")
