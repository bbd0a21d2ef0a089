"""`topw doctor`: show versions, providers and missing parts."""

from __future__ import annotations

import base64
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import click

from topw_deploy import install
from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json
from topw_deploy.errors import one_line
from topw_deploy.install import installed_version

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

# An ONNX model with one Identity node (IR version 8, opset 17).
_PROBE_MODEL = "CAgSADo3ChAKAXgSAXkiCElkZW50aXR5EgFwWg8KAXgSCgoICAESBAoCCAFiDwoBeRIKCggIARIECgIIAUIECgAQEQ=="


@dataclass(frozen=True)
class NativeDiagnosis:
    """State of the native sampler library.

    path: the library; None if there is none.
    instruction_set: instruction set that the library uses on this machine.
    state: "works" if an onnxruntime session opened with the library; otherwise why models use their own function.
    """

    path: str | None
    instruction_set: str | None
    state: str


@dataclass(frozen=True)
class CudaDiagnosis:
    """State of the library of CUDA kernels, and of the driver.

    path: the library; None if there is none.
    architectures: GPU targets that the library was compiled for, 87 for sm_87.
    why_unused: why no GPU of this machine uses the library; "" if one does.
    driver: the newest CUDA version that the driver supports; None without a driver.
    gpus: name and architecture of each GPU.
    """

    path: str | None
    architectures: tuple[int, ...]
    why_unused: str
    driver: str | None
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """State of this installation.

    topw_deploy, python, machine: version of this package, version and path of Python, system and architecture.
    versions: distribution -> version; None if it is not installed.
    providers: short name -> "starts" or an error, best provider first.
    would_use: the provider that provider="auto" chooses; None without onnxruntime.
    tensorrt: version of TensorRT's Python module, or why the module is missing.
    problems: what keeps models from running, as (problem, command that solves it).
    hints: what keeps models from being exported, as (problem, command that solves it).
    """

    topw_deploy: str
    python: str
    machine: str
    versions: dict[str, str | None]
    providers: dict[str, str]
    would_use: str | None
    native: NativeDiagnosis
    cuda: CudaDiagnosis
    tensorrt: str
    problems: list[tuple[str, str]]
    hints: list[tuple[str, str]]


@click.command(name="doctor", context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> int:
    """Show versions, execution providers, the provider a model would use, and how to install missing parts.

    The exit code is 1 if models cannot run here.
    """
    diagnosis = diagnose()
    if as_json:
        say_json(asdict(diagnosis), indent=2)
    else:
        say(*_lines(diagnosis))
    return 1 if diagnosis.problems else 0


def diagnose() -> Diagnosis:
    """Examine this installation. A provider "starts" if it opens a model of one node."""
    names = (*RUNTIME_PACKAGES, *EXPORT_PACKAGES, *ONNXRUNTIME_WHEELS[1:], *ENGINE_PACKAGES)
    versions = {name: installed_version(name) for name in names}
    providers, would_use, problems = _diagnose_providers()
    wheels = [name for name in ONNXRUNTIME_WHEELS if versions[name]]
    if len(wheels) > 1:
        problems.append(
            (
                f"{' and '.join(wheels)} overwrite each other's files",
                f"{install.pip_command('uninstall')} -y {' '.join(wheels)} && {install.install_command('gpu')}",
            )
        )
    missing = [name for name in RUNTIME_PACKAGES if not versions[name] and name != "onnxruntime"]
    if missing:
        problems.append((f"missing: {', '.join(missing)}", install.install_command()))
    hints = [install.install_advice("exporting", "export")] if install.missing_distributions("export") else []
    return Diagnosis(
        topw_deploy=installed_version("topw-deploy") or "not installed (running from source)",
        python=f"{platform.python_version()} ({sys.executable})",
        machine=f"{platform.system()} {platform.machine()}",
        versions=versions,
        providers=providers,
        would_use=would_use,
        native=_diagnose_native(),
        cuda=_diagnose_cuda(),
        tensorrt=_tensorrt_version(),
        problems=problems,
        hints=hints,
    )


def _diagnose_providers() -> tuple[dict[str, str], str | None, list[tuple[str, str]]]:
    try:
        import onnxruntime as ort
    except ImportError as error:
        return (
            {},
            None,
            [(f"onnxruntime cannot be imported ({error})", f"{install.install_command('cpu')}  # or [gpu]")],
        )
    from topw_deploy.runtime.ort import providers

    states = {providers.short_name(name): _provider_state(ort, name) for name in ort.get_available_providers()}
    preferred = providers.short_name(providers.resolve("auto"))
    problems = []
    if states[preferred] != "starts" and preferred != "cpu":
        problems.append(
            (f"{preferred} is built in but does not start: {states[preferred]}", install.install_command("gpu"))
        )
    return states, preferred if states[preferred] == "starts" else "cpu", problems


def _diagnose_native() -> NativeDiagnosis:
    try:
        import onnxruntime as ort
    except ImportError as error:
        return NativeDiagnosis(None, None, f"onnxruntime cannot be imported ({error})")
    from topw_deploy.runtime.ort import native, providers

    library, why = native.operator_library(providers.CPU, "")
    if library is None:
        return NativeDiagnosis(None, None, why)
    options = ort.SessionOptions()
    try:
        options.register_custom_ops_library(str(library.path))
        state = _provider_state(ort, providers.CPU, options)
    except Exception as error:  # noqa: BLE001  # the diagnosis shows any error of onnxruntime
        state = one_line(error, 200)
    return NativeDiagnosis(str(library.path), library.instruction_set, "works" if state == "starts" else state)


def _diagnose_cuda() -> CudaDiagnosis:
    from topw_deploy.plugins import library

    installed = library.read_status()
    gpus = tuple(f"{device.name}, sm_{device.architecture}" for device in installed.driver.devices)
    return CudaDiagnosis(
        installed.cuda.path, installed.cuda.architectures, installed.cuda.why_unused, installed.driver.cuda, gpus
    )


def _tensorrt_version() -> str:
    from topw_deploy.errors import TensorRTError
    from topw_deploy.tensorrt.check import load_tensorrt

    try:
        return str(load_tensorrt().__version__)
    except TensorRTError as error:
        return f"none: {error}"


def _provider_state(ort: Any, name: str, options: Any = None) -> str:
    """ "starts" if a session of this provider opens, or else why it does not."""
    from topw_deploy.runtime.ort import providers

    options = options or ort.SessionOptions()
    options.log_severity_level = 4
    missing = providers.missing_libraries(name)
    try:
        session = ort.InferenceSession(base64.b64decode(_PROBE_MODEL), options, providers=[name], enable_fallback=0)
    except Exception as error:  # noqa: BLE001  # the diagnosis shows any error of the provider
        return "; ".join(filter(None, (one_line(error, 200), missing)))
    if name in session.get_providers():
        return "starts"
    return f"onnxruntime could not load its libraries{f' ({missing})' if missing else ''}"


def _lines(diagnosis: Diagnosis) -> list[str]:
    lines = [
        f"topw-deploy  {diagnosis.topw_deploy}",
        f"python       {diagnosis.python}",
        f"machine      {diagnosis.machine}",
        "",
        "versions",
    ]
    versions_shown = {
        name: version
        for name, version in diagnosis.versions.items()
        if version or name in (*RUNTIME_PACKAGES, *EXPORT_PACKAGES)
    }
    lines += [f"  {name.ljust(16)} {version or '-'}" for name, version in versions_shown.items()]
    lines += ["", "providers"]
    lines += [f"  {name.ljust(16)} {state}" for name, state in diagnosis.providers.items()] or ["  none"]
    lines += ["", f"a model would run on: {diagnosis.would_use or 'nothing'}", _native_line(diagnosis.native)]
    lines += [*_cuda_lines(diagnosis.cuda), f"TensorRT: {diagnosis.tensorrt}"]
    for title, pairs in (("problem", diagnosis.problems), ("hint", diagnosis.hints)):
        lines += [f"{title}: {what}; run: {cure}" for what, cure in pairs]
    return lines


def _native_line(native: NativeDiagnosis) -> str:
    if native.path is None:
        return f"native sampler: none, models run their own function ({native.state})"
    return f"native sampler: {native.state}, {native.instruction_set}, {native.path}"


def _cuda_lines(cuda: CudaDiagnosis) -> list[str]:
    if cuda.path is None:
        library = f"none ({cuda.why_unused})"
    else:
        state = f"unused, {cuda.why_unused}" if cuda.why_unused else "for the GPU here"
        library = f"{state}, {' '.join(f'sm_{number}' for number in cuda.architectures)}, {cuda.path}"
    driver = f"runs CUDA {cuda.driver}, {'; '.join(cuda.gpus) or 'no GPU'}" if cuda.driver else "none"
    return [f"CUDA sampler: {library}", f"NVIDIA driver: {driver}"]
