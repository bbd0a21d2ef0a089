"""Imports point one way: cli -> export | engine -> runtime -> sampling; each part needs only its own libraries.

The parts of `topw_lab` may use those of `topw_deploy`; there only commands import them, in functions.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from tests.support import import_graph
from tests.support.import_graph import MODULES, imports
from tests.support.samples import slow
from topw_deploy import install

# Parts that each part may import.
LEAVES = {"errors", "text", "folders", "dtypes", "progress", "install", "manifest", "sampling"}
ALLOWED = {
    "errors": set(),
    "dtypes": set(),
    "progress": set(),
    "device_lock": set(),
    "folders": {"errors", "text"},
    "text": {"errors"},
    "install": {"errors"},
    "tiny": set(),
    "sampling": {"errors", "text"},
    "manifest": {"dtypes", "errors", "folders", "sampling"},
    "safetensors_header": {"dtypes", "text"},
    "plugins": {"errors", "folders", "dtypes", "progress", "install", "sampling"},
    "tensorrt": LEAVES | {"device_lock", "plugins"},
    "runtime": LEAVES | {"device_lock", "plugins", "tensorrt"},
    "engine": LEAVES | {"safetensors_header", "runtime"},
    "serve": {"errors", "install", "manifest", "text", "sampling", "runtime", "engine"},
    "triton": {"errors", "folders", "manifest", "runtime", "engine"},
    "web": {"errors", "folders", "manifest", "text", "install"},
    "export": LEAVES | {"safetensors_header", "runtime", "tiny"},
    "stats": LEAVES | {"plugins", "runtime", "export", "plots", "tables", "running"},
    "bench": LEAVES | {"plugins", "runtime", "engine", "export", "plots", "tables", "worker"},
    "compare": {"errors", "manifest", "progress", "text", "sampling", "runtime", "plots", "tables", "running"},
    "harness": {"errors", "install", "manifest", "sampling", "runtime", "running"},
    "judges": {"errors", "text"},
    "running": {"errors", "runtime", "engine"},
    "tables": set(),
    "plots": {"errors", "install", "text"},
    "worker": {"errors"},
    "cli": LEAVES
    | {"plugins", "tensorrt", "runtime"}
    | {"export", "serve", "triton", "web"}
    | {"stats", "bench", "compare", "harness", "judges", "plots"},
    "__main__": {"cli"},
    "__init__": {"engine", "export", "runtime"},  # imported when one of their names is used
}

# Other libraries that a part imports anywhere, and those that importing its modules loads.
RUNTIME = {"numpy", "onnxruntime", "tokenizers", "minijinja", "msgspec"}
EXPORTER = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "ml_dtypes"}
SERVER = {"anyio", "starlette", "sse_starlette", "uvicorn", "h11", "pydantic", "prometheus_client"}
NAMED = {
    "manifest": set(),
    "sampling": {"numpy"},
    "plugins": {"numpy"},
    "tensorrt": {"numpy", "msgspec"},
    "runtime": RUNTIME,
    "engine": {"numpy"},
    "triton": {"numpy", "triton_python_backend_utils"},
    "serve": SERVER | {"numpy"},
    "export": EXPORTER | {"numpy", "onnxruntime", "tokenizers", "huggingface_hub", "gguf", "sentencepiece"},
    "stats": {"numpy", "matplotlib", "ot"},
    "bench": {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxruntime_genai", "optimum"}
    | {"torch", "transformers", "matplotlib"},
    "compare": {"numpy", "sacrebleu"},
    "cli": {"click", "msgspec", "onnxruntime"},
    "harness": {"numpy", "lm_eval", "tqdm"},
    "plots": {"matplotlib"},
}
LOADED = {
    "manifest": {"numpy"},
    "safetensors_header": {"numpy"},
    "tensorrt": {"numpy", "msgspec"},
    "runtime": RUNTIME,
    "engine": RUNTIME,
    "serve": RUNTIME | SERVER,
    "triton": RUNTIME | {"triton_python_backend_utils"},
    "export": EXPORTER | RUNTIME,
    "stats": RUNTIME | {"onnx", "onnx_ir", "onnxscript", "ml_dtypes"},
    "bench": RUNTIME,
    "compare": RUNTIME,
    "running": RUNTIME,
    "cli": {"click", "msgspec", "numpy"},
    "harness": RUNTIME | {"lm_eval", "tqdm"},
    "web": {"numpy"},
    "__main__": {"click", "msgspec", "numpy"},
}
# Rooms with more libraries, a folder or a module; nothing imports them unasked.
WITHIN = {
    "sampling/torch": {"numpy", "torch"},
    "sampling/processor": {"numpy", "torch", "transformers"},
    "runtime/structured": RUNTIME | {"llguidance"},
    "runtime/guide": RUNTIME | {"llguidance"},
    "serve/ray": RUNTIME | SERVER | {"ray"},
}


# Rooms of a part from the lowest on: each may import those before it, also in functions. A room is a folder with all
# below it, or a module.
ORDER = (
    (
        *(
            "export/graph",
            "export/products",
            "export/embedding",
            "export/source",
            "export/quantise",
            "export/options",
            "export/sampler",
        ),
        *("export/trace", "export/lowering", "export/foreign", "export/native_functions"),
        *("export/write", "export/verification", "export/traced_decoder", "export/pipeline"),
        *("export/sampler_only", "export"),
    ),
    (
        *(
            "runtime/tokenizer",
            "runtime/structured",
            "runtime/guide",
            "runtime/results",
            "runtime/tools",
            "runtime/session",
        ),
        *("runtime/parameters", "runtime/sequence"),
        *(
            "runtime/inputs",
            "runtime/cache",
            "runtime/speculate",
            "runtime/draft_model",
            "runtime/loop",
            "runtime/prepare",
        ),
        *("runtime/ort", "runtime"),
    ),
)


def place_in(order: tuple[str, ...], module: str) -> int | None:
    """The position of the most specific room of `module`."""
    path = "/".join(module.split(".")[1:])
    found = [room for room in order if path == room or path.startswith(f"{room}/")]
    return order.index(max(found, key=len)) if found else None


def part_of(module: str) -> str:
    """`export` for `topw_deploy.export.pipeline`."""
    return (*module.split("."), "__init__")[1]


def libraries(names: set[str]) -> set[str]:
    found = {name.split(".")[0] for name in names} - sys.stdlib_module_names - import_graph.PACKAGES
    return found - {"msgspec"}  # a dependency of the manifest, and so of every part


ROOMS: dict[str, list[str]] = defaultdict(list)
"""Modules by folder."""
for name in MODULES:
    ROOMS[import_graph.room_of(name)].append(name)
rooms = pytest.mark.parametrize("room", ROOMS)


def within(module: str, others: set[str]) -> set[str]:
    """The libraries of a room of WITHIN; `others` for any other module."""
    return WITHIN.get("/".join(module.split(".")[1:]), WITHIN.get(import_graph.room_of(module), others))


@rooms
def test_imports_point_one_way(room: str) -> None:
    for module in ROOMS[room]:
        part = part_of(module)
        parts = {part_of(found.name) for found in imports(module) if found.name in MODULES}
        assert parts - {part, "__init__"} <= ALLOWED.get(part, set()), module


def test_only_commands_import_the_laboratory_and_only_in_functions() -> None:
    for module in MODULES:
        if module.split(".")[0] == "topw_deploy":
            found = {each.when for each in imports(module) if each.name.split(".")[0] == "topw_lab"}
            assert found <= ({"types", "call"} if part_of(module) == "cli" else set()), module


@pytest.mark.parametrize("order", ORDER, ids=lambda order: order[-1])
def test_rooms_of_a_part_import_only_lower_ones(order: tuple[str, ...]) -> None:
    wrong = []
    for module in MODULES:
        place = place_in(order, module)
        if place is None:
            continue
        for found in imports(module):
            other = place_in(order, found.name)
            if found.name in MODULES and other is not None and other > place and not is_package(found.name):
                wrong.append((module, found.name))
    assert not wrong


def is_package(module: str) -> bool:
    """Importing from a package runs its __init__, which lists what it offers."""
    return MODULES[module].name == "__init__.py"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not import_graph.cycle()


@rooms
def test_each_part_names_only_its_own_libraries(room: str) -> None:
    for module in ROOMS[room]:
        allowed = within(module, NAMED.get(part_of(module), set()))
        assert libraries({found.name for found in imports(module)}) <= allowed, module


@rooms
def test_importing_a_module_loads_only_its_part_s_libraries(room: str) -> None:
    for module in ROOMS[room]:
        part = part_of(module)
        allowed = within(module, LOADED.get(part, NAMED.get(part, set())))
        assert libraries(import_graph.loaded_by(module)) <= allowed, module


# Modules of the runtime that check settings, tokenizers and templates. They run no model.
RULES_OF_INPUTS = {"chat", "parameters", "prepare", "tokenizer"}


def test_the_exporter_runs_models_only_to_verify_them() -> None:
    for module in MODULES:
        if part_of(module) == "export" and import_graph.room_of(module) != "export/verification":
            of_runtime = {found.name for found in imports(module) if found.name.startswith("topw_deploy.runtime.")}
            assert of_runtime <= {f"topw_deploy.runtime.{name}" for name in RULES_OF_INPUTS}, module


def test_the_import_graph_lists_the_modules_behind_a_package() -> None:
    named = {found.name for found in imports("topw_deploy.runtime.tokenizer")}
    assert "topw_deploy.manifest" in named
    assert "onnxruntime" in import_graph.loaded_by("topw_lab.stats.collect")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split()[-1000:])


HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript"}


def test_importing_the_runtime_loads_no_exporter_library() -> None:
    loaded = loaded_by("from topw_deploy.runtime import TopWModel")
    assert "onnxruntime" in loaded
    assert not loaded & (HEAVY | {"click", "huggingface_hub"})


def test_the_runtime_without_onnxruntime_says_what_to_install() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from topw_deploy.runtime import TopWModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "running a model needs onnxruntime, which is not installed ([cpu] brings it, or [gpu]" in done.stderr
    assert done.stderr.endswith(f"; run: {install.install_command('cpu')}\n")


def test_importing_the_reference_loads_numpy_alone() -> None:
    assert not loaded_by("import topw_deploy.sampling") & (HEAVY | {"onnxruntime", "click", "tokenizers", "minijinja"})


@pytest.mark.parametrize(
    "arguments", ["['-h']", "['generate', '--help']", *map(slow, ("['inspect', '--help']", "['--version']"))]
)
def test_help_loads_neither_torch_nor_onnxruntime(arguments: str) -> None:
    statement = f"""
import contextlib, io
from topw_deploy.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main({arguments})
assert out.getvalue()
"""
    assert not loaded_by(statement) & (HEAVY | {"onnxruntime", "tokenizers"})
