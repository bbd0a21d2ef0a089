"""The extras: their distributions and install commands.

The package is not on a package index, so commands name the origin of this copy: a clone, a wheel or a repository
(pip's direct_url.json).
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

from topw_deploy import versions
from topw_deploy.errors import MissingPackageError

NAME = "topw-deploy"
MODULES = {
    "cpu": {"onnxruntime": "onnxruntime"},
    "structured": {"llguidance": "llguidance"},
    "exact": {"POT": "ot"},
    "serve": {
        "starlette": "starlette",
        "sse-starlette": "sse_starlette",
        "uvicorn": "uvicorn",
        "pydantic": "pydantic",
        "prometheus-client": "prometheus_client",
        "anyio": "anyio",
    },
    "compare": {"sacrebleu": "sacrebleu"},
    "lm-eval": {"lm-eval": "lm_eval"},
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
    """Raises MissingPackageError if packages of `extra` are missing.

    what: sentence subject, like "exporting".
    """
    if extra == "export" and sys.version_info < EXPORT_PYTHON:
        raise MissingPackageError(why_not_this_python(what))
    if missing(extra):
        raise MissingPackageError(sentence(what, extra))


def missing(extra: str) -> list[str]:
    """Distributions of `extra` that cannot be imported."""
    return [name for name, module in MODULES[extra].items() if not importable(module)]


def extra_of(module: str) -> str | None:
    """The extra that installs `module`'s top-level package, or None."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in MODULES.items() if top in modules.values()), None)


def sentence(what: str, extra: str) -> str:
    """`exporting needs torch and onnx, which are not installed; run: ...`"""
    return "; run: ".join(advice(what, extra))


def advice(what: str, extra: str) -> tuple[str, str]:
    """(what is missing, install command)."""
    *some, last = missing(extra) or [f"the packages of [{extra}]"]
    names = f"{', '.join(some)} and {last}" if some else last
    found = f"{what} needs {names}, which {'are' if some else 'is'} not installed"
    if extra == "export" and versions.installed("onnxruntime-gpu"):
        other = "activate another environment first: [export] brings onnxruntime, which overwrites onnxruntime-gpu"
        return f"{found}; {other}", f"pip install {requirement(extra)}"
    if extra == "cpu":
        found += " ([cpu] brings it, or [gpu] for NVIDIA GPUs, never both)"
    return found, how_to(extra)


def why_not_this_python(what: str) -> str:
    """Why this Python cannot export, and the next step."""
    found = f"{what} needs Python {_LEAST} or newer, and this is {platform.python_version()}"
    if what == "exporting":
        return f"{found}; export on another machine and copy the folder to this one."
    return f"{found}; in another environment run: {how_to('export')}"


def how_to(extra: str = "") -> str:
    """Install command for `extra` or the package's own dependencies.

    The command names a newer Python if this one is too old.
    """
    if extra == "export" and sys.version_info < EXPORT_PYTHON:
        return f"python{_LEAST} -m pip install {requirement(extra)}"
    return f"{pip('install')} {requirement(extra)}"


def pip(verb: str) -> str:
    """The pip command for this interpreter, which works even if pip is not on PATH."""
    found = shutil.which("pip")
    python = shlex.quote(sys.executable)
    if found and Path(found).parent == Path(sys.executable).parent:
        return f"pip {verb}"
    if not importable("pip") and shutil.which("uv"):  # uv's environments have no pip
        return f"uv pip {verb} --python {python}"
    return f"{python} -m pip {verb}"


def requirement(extra: str = "") -> str:
    """Shell-quoted `pip install` argument for this copy."""
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
    return shlex.quote(f"{NAME}{wanted}")  # installed, so pip skips the index


def _origin() -> dict[str, Any]:
    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent package
        return False
