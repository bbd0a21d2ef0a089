"""The package's extras: their distributions, which of them are missing, and the command that installs them.

The package is on no index, so the command depends on where this copy came from: a clone, a wheel or a repository, as
pip records in direct_url.json.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from topw_deploy.errors import MissingPackageError

NAME = "topw-deploy"
MODULES = {
    "cpu": {"onnxruntime": "onnxruntime"},
    "export": {
        "torch": "torch",
        "transformers": "transformers",
        "onnx": "onnx",
        "onnx-ir": "onnx_ir",
        "onnxscript": "onnxscript",
        "huggingface-hub": "huggingface_hub",
        "safetensors": "safetensors",
        "sentencepiece": "sentencepiece",
        "protobuf": "google.protobuf",
        "tqdm": "tqdm",
    },
}
"""Extra -> its distributions beyond the package's own dependencies -> the module of each."""

EXPORT_PYTHON = (3, 11)
"""The oldest Python that exporting is tested with."""

_LEAST = ".".join(map(str, EXPORT_PYTHON))
_SOURCES = Path(__file__).resolve().parents[1]


def require(what: str, extra: str) -> None:
    """Raises MissingPackageError if a package of `extra` is missing.

    what: subject of the sentence, like "exporting".
    """
    if extra == "export" and sys.version_info < EXPORT_PYTHON:
        raise MissingPackageError(why_not_this_python(what))
    if missing(extra):
        raise MissingPackageError(sentence(what, extra))


def missing(extra: str) -> list[str]:
    """The distributions of `extra` that cannot be imported here."""
    return [name for name, module in MODULES[extra].items() if not importable(module)]


def extra_of(module: str) -> str | None:
    """The extra with the top-level package of `module`; None if there is none."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in MODULES.items() if top in modules.values()), None)


def sentence(what: str, extra: str) -> str:
    """`exporting needs torch and onnx, which are not installed; run: ...`, naming every missing distribution."""
    return "; run: ".join(advice(what, extra))


def advice(what: str, extra: str) -> tuple[str, str]:
    """A clause on what is missing, and the command that installs it."""
    *some, last = missing(extra) or [f"the packages of [{extra}]"]
    names = f"{', '.join(some)} and {last}" if some else last
    found = f"{what} needs {names}, which {'are' if some else 'is'} not installed"
    if extra == "export" and _installed("onnxruntime-gpu"):
        other = "activate another environment first: [export] brings onnxruntime, which overwrites onnxruntime-gpu"
        return f"{found}; {other}", f"pip install {requirement(extra)}"
    if extra == "cpu":
        found += " ([cpu] brings it, or [gpu] for NVIDIA GPUs, never both)"
    return found, how_to(extra)


def why_not_this_python(what: str) -> str:
    """Why this Python cannot export, and what to do."""
    found = f"{what} needs Python {_LEAST} or newer, and this is {platform.python_version()}"
    if what == "exporting":
        return f"{found}; export on another machine and copy the folder to this one."
    return f"{found}; in another environment run: {how_to('export')}"


def how_to(extra: str = "") -> str:
    """The command that installs `extra`, or without one the package's own dependencies, into this environment.

    For an extra that needs a newer Python, a command for an environment with that Python.
    """
    if extra == "export" and sys.version_info < EXPORT_PYTHON:
        return f"python{_LEAST} -m pip install {requirement(extra)}"
    return f"{pip('install')} {requirement(extra)}"


def pip(verb: str) -> str:
    """The start of a pip command for this interpreter, whether or not it is on PATH."""
    found = shutil.which("pip")
    python = shlex.quote(sys.executable)
    if found and Path(found).parent == Path(sys.executable).parent:
        return f"pip {verb}"
    if not importable("pip") and shutil.which("uv"):  # uv's environments have no pip
        return f"uv pip {verb} --python {python}"
    return f"{python} -m pip {verb}"


def requirement(extra: str = "") -> str:
    """The argument of `pip install` for this copy of the package with `extra`, quoted for a shell."""
    wanted = f"[{extra}]" if extra else ""
    if _SOURCES.name == "src" and (_SOURCES.parent / "pyproject.toml").is_file():
        return f"-e {shlex.quote(f'{_SOURCES.parent}{wanted}')}"
    origin = _origin()
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = Path(url2pathname(urlsplit(url).path))
        if path.exists():
            return shlex.quote(f"{path}{wanted}")
    elif url and "vcs_info" in origin:
        told = origin["vcs_info"]
        return shlex.quote(f"{NAME}{wanted} @ {told['vcs']}+{url}@{told['commit_id']}")
    elif url:
        return shlex.quote(f"{NAME}{wanted} @ {url}")
    return shlex.quote(f"{NAME}{wanted}")  # installed already, so pip does not look for it on an index


def _origin() -> dict[str, Any]:
    """direct_url.json of the installed package; empty if there is none."""
    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
