"""`topw doctor`: show versions, providers and missing parts."""

from __future__ import annotations

import base64
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from topw_deploy import install
from topw_deploy.cli.options import CONTEXT, json_option
from topw_deploy.cli.terminal import say, say_json
from topw_deploy.errors import TensorRTError, one_line
from topw_deploy.install import installed_version
from topw_deploy.plugins import library
from topw_deploy.tensorrt.check import load_tensorrt

RUNTIME_PACKAGES = ("numpy", "onnxruntime", "tokenizers", "minijinja", "msgspec", "click")
EXPORT_PACKAGES = tuple(install.MODULES["export"])
ONNXRUNTIME_WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-silicon",
)
"""Distributions that contain the module `onnxruntime`. Only one of them may be installed."""

ENGINE_PACKAGES = ("tensorrt", "cuda-python")
"""Packages that run TensorRT engines. They are shown only if they are installed."""

_CUDA_PROVIDER = "libonnxruntime_providers_cuda.so"

# An ONNX model with one Identity node (IR version 8, opset 17).
_PROBE_MODEL = "CAgSADo3ChAKAXgSAXkiCElkZW50aXR5EgFwWg8KAXgSCgoICAESBAoCCAFiDwoBeRIKCggIARIECgIIAUIECgAQEQ=="


Fault = tuple[str, str]
"""(what is wrong, the command that solves it)"""


@click.command(name="doctor", context_settings=CONTEXT)
@json_option
def doctor(as_json: bool) -> int:
    """Show versions, execution providers, the provider a model would use, and how to install missing parts.

    The exit code is 1 if models cannot run here.
    """
    report, status = diagnose(), library.read_status()
    if as_json:
        say_json({**report, **asdict(status)}, indent=2)
    else:
        say(*_lines(report, status))
    return 1 if report["problems"] else 0


def diagnose() -> dict[str, Any]:
    """Examine this installation. A provider "starts" if it opens a model of one node. The fields are:

    topw_deploy, python, machine: version of this package, version and path of Python, system and architecture.
    versions: distribution -> version; None if it is not installed.
    providers: short name -> "starts" or an error, best provider first.
    would_use: the provider that provider="auto" chooses; None without onnxruntime.
    native_sampler: "works" if onnxruntime opens the native sampler's library, or why models use their own function.
    tensorrt: version of TensorRT's Python module, or why the module is missing.
    extras: extra -> distributions that it lacks; the other extras ([gpu], [tensorrt]) are seen above.
    problems: what keeps models from running, as (problem, command that solves it).
    hints: what keeps models from being exported, as (problem, command that solves it).
    """
    names = (*RUNTIME_PACKAGES, *EXPORT_PACKAGES, *ONNXRUNTIME_WHEELS[1:], *ENGINE_PACKAGES)
    versions = {name: installed_version(name) for name in names}
    running, problems = _diagnose_onnxruntime()
    wheels = [name for name in ONNXRUNTIME_WHEELS if versions[name]]
    if len(wheels) > 1:
        cure = f"{install.pip_command('uninstall')} -y {' '.join(wheels)} && {install.install_command('gpu')}"
        problems.append((f"{' and '.join(wheels)} overwrite each other's files", cure))
    missing = [name for name in RUNTIME_PACKAGES if not versions[name] and name != "onnxruntime"]
    if missing:
        problems.append((f"missing: {', '.join(missing)}", install.install_command()))
    try:
        tensorrt = str(load_tensorrt().__version__)
    except TensorRTError as error:
        tensorrt = f"none: {error}"
    return {
        "topw_deploy": installed_version("topw-deploy") or "not installed (running from source)",
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        **running,
        "tensorrt": tensorrt,
        "extras": {extra: install.missing_distributions(extra) for extra in install.MODULES},
        "problems": problems,
        "hints": [install.install_advice("exporting", "export")] if install.missing_distributions("export") else [],
    }


def _diagnose_onnxruntime() -> tuple[dict[str, Any], list[Fault]]:
    """The fields of onnxruntime, and its problems."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        why = f"onnxruntime cannot be imported ({error})"
        return {"providers": {}, "would_use": None, "native_sampler": why}, [
            (why, f"{install.install_command('cpu')}  # or [gpu]")
        ]
    from topw_deploy.runtime.ort import native, providers

    states = {providers.short_name(name): _provider_state(ort, name) for name in ort.get_available_providers()}
    preferred = providers.short_name(providers.resolve("auto"))
    starts, problems = states[preferred] == "starts", list[Fault]()
    if not starts and preferred != "cpu":
        what = f"{preferred} is built in but does not start: {states[preferred]}"
        problems.append((what, install.install_command("gpu")))
    provider = Path(ort.__file__).with_name("capi") / _CUDA_PROVIDER
    problems += _gpus_without_code(provider, library.query_driver().devices)
    found, native_state = native.operator_library(providers.CPU, "")
    if found is not None:
        state = _provider_state(ort, providers.CPU, str(found.path))
        native_state = "works" if state == "starts" else state
    used = preferred if starts else "cpu"
    return {"providers": states, "would_use": used, "native_sampler": native_state}, problems


def _gpus_without_code(provider: Path, devices: Sequence[library.Device]) -> list[Fault]:
    """GPUs for which onnxruntime's CUDA provider has no code. The provider starts on them, but no kernel runs."""
    code = library.read_gpu_code(provider) if devices and provider.is_file() else None
    if code is None or not (code.code or code.ptx):
        return []
    names = " ".join(f"sm_{number}" for number in sorted(code.code)) + (" and PTX" if code.ptx else "")
    return [
        (
            f"onnxruntime's CUDA provider has code for {names}, but none for {device.name} (sm_{device.architecture})",
            "topw-export MODEL OUT --target tensorrt && topw build-engine OUT  # or --provider cpu",
        )
        for device in devices
        if not code.runs_on(device.architecture)
    ]


def _provider_state(ort: Any, name: str, operators: str = "") -> str:
    """ "starts" if a session of this provider opens, or else why it does not. operators: a library to register."""
    from topw_deploy.runtime.ort import providers

    options = ort.SessionOptions()
    options.log_severity_level = 4
    missing = providers.missing_libraries(name)
    try:
        if operators:
            options.register_custom_ops_library(operators)
        session = ort.InferenceSession(base64.b64decode(_PROBE_MODEL), options, providers=[name], enable_fallback=0)
    except Exception as error:  # noqa: BLE001  # the diagnosis shows any error of the provider
        return "; ".join(filter(None, (one_line(error, 200), missing)))
    if name in session.get_providers():
        return "starts"
    return f"onnxruntime could not load its libraries{f' ({missing})' if missing else ''}"


def _lines(report: dict[str, Any], status: library.Status) -> list[str]:
    named = (*RUNTIME_PACKAGES, *EXPORT_PACKAGES)
    versions = {name: version or "-" for name, version in report["versions"].items() if version or name in named}
    lines = [f"{name.ljust(12)} {report[name]}" for name in ("topw_deploy", "python", "machine")]
    extras = {name: f"lacks {', '.join(lacking)}" if lacking else "installed"
              for name, lacking in report["extras"].items()}  # fmt: skip
    groups = {
        "versions": versions,
        f"extras ({install.install_command('NAME')})": extras,
        "providers": report["providers"] or {"none": ""},
    }
    for title, states in groups.items():
        lines += ["", title, *(f"  {name.ljust(16)} {state}".rstrip() for name, state in states.items())]
    lines += [
        "",
        f"a model would run on: {report['would_use'] or 'nothing'}",
        f"native sampler: {report['native_sampler']}",
        *library.status_lines(status),
        f"TensorRT: {report['tensorrt']}",
    ]
    for title in ("problem", "hint"):
        lines += [f"{title}: {what}; run: {cure}" for what, cure in report[f"{title}s"]]
    return lines
