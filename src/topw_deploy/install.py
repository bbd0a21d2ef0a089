"""Versions of packages, which are missing, and how to install them.

This package is not on a package index. So an install command names the clone, or the installed package, whose extras
pip finds without an index.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

import topw_deploy
from topw_deploy.errors import MissingPackageError

NAME = "topw-deploy"
_EXPORTED_WITH = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
_EXTRAS = {
    "cpu": "onnxruntime",
    "structured": "llguidance",
    "exact": "POT",
    "serve": "starlette sse-starlette uvicorn h11 pydantic prometheus-client anyio",
    "compare": "sacrebleu",
    "plot": "matplotlib",
    "ray": "ray",
    "lm-eval": "lm-eval",
    "gguf": "gguf",
    "export": "torch transformers onnx onnx-ir onnxscript huggingface-hub safetensors sentencepiece protobuf tqdm",
}
_OTHER_MODULES = {"POT": "ot", "protobuf": "google.protobuf"}  # of others, "-" becomes "_"
MODULES = {
    extra: {name: _OTHER_MODULES.get(name, name.replace("-", "_")) for name in names.split()}
    for extra, names in _EXTRAS.items()
}
"""Extra -> {distribution: module} of what the extra adds to the package's own dependencies."""

_SOURCES = Path(__file__).resolve().parents[1]


def require(what: str, extra: str) -> None:
    """Raises MissingPackageError if packages of `extra` are missing.

    what: the subject of the message, such as "exporting".
    """
    if missing_distributions(extra):
        raise MissingPackageError(missing_message(what, extra))


def missing_distributions(extra: str) -> list[str]:
    """Return the distributions of `extra` that cannot be imported."""
    return [name for name, module in MODULES[extra].items() if not is_importable(module)]


def extra_of(module: str) -> str | None:
    """Return the extra that installs the top-level package of `module`, or None."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in MODULES.items() if top in modules.values()), None)


def missing_message(what: str, extra: str) -> str:
    """Return the message for missing packages: `exporting needs torch and onnx, which are not installed; run: ...`"""
    return "; run: ".join(install_advice(what, extra))


def install_advice(what: str, extra: str) -> tuple[str, str]:
    """Return (what is missing, the install command)."""
    *some, last = missing_distributions(extra) or [f"the packages of [{extra}]"]
    names = f"{', '.join(some)} and {last}" if some else last
    found = f"{what} needs {names}, which {'are' if some else 'is'} not installed"
    if extra == "export" and installed_version("onnxruntime-gpu"):
        other = "activate another environment first: [export] brings onnxruntime, which overwrites onnxruntime-gpu"
        return f"{found}; {other}", f"pip install {requirement(extra)}"
    if extra == "cpu":
        found += " ([cpu] brings it, or [gpu] for NVIDIA GPUs, never both)"
    return found, install_command(extra)


def install_command(extra: str = "") -> str:
    """Return the command that installs `extra`, or the package's own dependencies."""
    return f"{pip_command('install')} {requirement(extra)}"


def pip_command(verb: str) -> str:
    """Return the pip command for this interpreter. It works even if pip is not on PATH."""
    found = shutil.which("pip")
    python = shlex.quote(sys.executable)
    if found and Path(found).parent == Path(sys.executable).parent:
        return f"pip {verb}"
    if not is_importable("pip") and shutil.which("uv"):  # uv's environments have no pip
        return f"uv pip {verb} --python {python}"
    return f"{python} -m pip {verb}"


def requirement(extra: str = "") -> str:
    """Return the argument of `pip install` that names this copy, quoted for the shell."""
    wanted = f"[{extra}]" if extra else ""
    if _SOURCES.name == "src" and (_SOURCES.parent / "pyproject.toml").is_file():
        return f"-e {shlex.quote(f'{_SOURCES.parent}{wanted}')}"
    return shlex.quote(f"{NAME}{wanted}")  # this package is installed already, so pip does not look on an index


def is_importable(module: str) -> bool:
    """Whether a module is installed. Does not import the module itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def major_minor(version: str) -> tuple[int, ...]:
    """Return the major and the minor number, to compare versions: (10, 13) for `10.13.3.9`, () for an empty string."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def library_versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that an export uses, by name."""
    found = {name: version for name in _EXPORTED_WITH if (version := installed_version(name)) is not None}
    return {"topw_deploy": topw_deploy.__version__} | found
