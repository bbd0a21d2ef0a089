"""Fixtures and hooks shared by test folders."""

from __future__ import annotations

import gc
import os
import platform
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.shared import made_once, root_of_run

# There is a worker for each core already. Libraries read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests must not depend on the clock: machines can be slow.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("all"), max_examples=20)

# A shell ignores the signal in what it starts in the background, and tests and their processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

_WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.(slow|long|broad)(?: +#.*)?$", re.MULTILINE)
_WEIGHTS = {"slow": 1, "long": 2, "broad": 2}
REPORTED = ("numpy", "onnxruntime", "tokenizers", "onnx", "onnx-ir", "torch", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("topw_deploy")
    group.addoption("--quick", action="store_true", help="leave out what is marked, and most cases: `make quick`")
    group.addoption("--long", action="store_true", help="run what is marked long, and all cases, as CI does")
    group.addoption("--broad", action="store_true", help="run everything, also what is marked broad")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples Hypothesis tries, before test modules are imported."""
    settings.load_profile("quick" if config.option.quick else "all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that are left out whole: with their libraries, that takes longer than many tests."""
    if collection_path.suffix != ".py" or collection_path in _named(config):
        return None
    whole = _WHOLE_FILE.search(collection_path.read_text("utf-8"))
    return True if whole and whole[1] in _unwanted(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect by option unless named; run the longest files first to balance workers."""
    unwanted, named = _unwanted(config), _named(config)
    left_out = {i for i in items if i.path not in named and any(i.get_closest_marker(mark) for mark in unwanted)}
    if "long" in unwanted:
        most = 1 if config.option.quick else 2  # cases of a slow test, and with --quick of any
        cases: Counter[str] = Counter()
        for item in items:
            if item.path not in named and (config.option.quick or item.get_closest_marker("slow")):
                test = item.nodeid.partition("[")[0]
                cases[test] += 1
                if cases[test] > most:
                    left_out.add(item)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    weights: dict[Path, int] = {}
    for item in items:
        weight = max((_WEIGHTS.get(mark.name, 0) for mark in item.iter_markers()), default=0)
        weights[item.path] = max(weights.get(item.path, 0), weight)
    items.sort(key=lambda item: -weights[item.path])


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections, each of which would walk through all of torch."""
    gc.collect()
    gc.freeze()


def _unwanted(config: pytest.Config) -> set[str]:
    if config.option.quick:
        return {"slow", "long", "broad"}
    return set() if config.option.broad else {"broad"} if config.option.long else {"long", "broad"}


def _named(config: pytest.Config) -> set[Path]:
    return {Path(argument.partition("::")[0]).resolve() for argument in config.args if ".py" in argument}


def pytest_report_header() -> str:
    """Versions that affect the tests."""
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in REPORTED if name in installed)
    return f"{versions}, {platform.machine()}, {os.cpu_count()} cores"


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolate tests from the user's home, settings and network."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TOPW_", "HF_", "HUGGING"))]:
            patch.delenv(name)
        for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"):
            patch.setenv(name, str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(socket.socket, "connect", _refuse)
        patch.setattr(socket.socket, "connect_ex", _refuse)
        patch.setattr(socket, "getaddrinfo", _refuse)
        yield


_connect = socket.socket.connect


def _refuse(*arguments: Any, **_: Any) -> Any:
    if arguments and isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX:
        return _connect(*arguments)
    raise OSError(f"a test tried to use the network: {arguments[1:]!r}")


@pytest.fixture(scope="session", autouse=True)
def repeated_work_shared(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace each model once and import torch for verifications once, if the collected tests import the exporter."""
    if "topw_deploy.export.trace.trace" not in sys.modules:
        yield
        return
    from tests.support import traces, warm_process
    from topw_deploy.export import traced_decoder
    from topw_deploy.export.verification import run as in_subprocess

    folder = root_of_run(tmp_path_factory) / "traces"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "folder", folder)
        patch.setattr(traced_decoder, "trace", traces.trace)
        if sys.platform != "win32":
            patch.setattr(in_subprocess, "start", warm_process.start)
        yield


@pytest.fixture(scope="session")
def demo_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, exported once."""
    from topw_deploy.export import export_model

    def make(folder: Path) -> None:
        export_model("tiny", folder, verify=False)

    return made_once(tmp_path_factory, "demo", make)
