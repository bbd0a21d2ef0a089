"""Make the environment: `python -m tests.nvidia.make_environment .nvidia [option of pip ...]`.

It has TensorRT-RTX's libraries under TensorRT's names, see requirements.txt. If packages are unavailable, absent.txt
gives the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from topw_deploy.plugins import compile_native

HERE = Path(__file__).parent
PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"
REASON = "absent.txt"
_LINKS = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.1.*",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1.*",
    "libtensorrt_rtx.so": "libtensorrt_rtx.so.1.*",
}


def make(folder: Path, pip_options: list[str]) -> None:
    """Raises OSError, CalledProcessError, StopIteration or NotBuiltError if a part is missing."""
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    requirements = ["-r", str(HERE / "requirements.txt")]
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:", *pip_options]
    run([str(folder / "bin" / "python"), "-m", "pip", "install", *options, *requirements])
    package = next(folder.glob(f"lib/python3.*/site-packages/{PACKAGE}")).absolute()
    for link, pattern in _LINKS.items():
        target = next(package.glob(pattern))
        for place in (folder / link, package / link):  # the builder reopens its library by name
            place.unlink(missing_ok=True)
            place.symlink_to(target)
    stub = folder / "libnvinfer_plugin.so.11"
    run([*compile_native.find_compiler(), "-shared", "-fPIC", str(HERE / "plugin_stub.cpp"), "-o", str(stub)])
    run([str(folder / "bin" / "python"), "-c", "import tensorrt_bindings"], environment(folder))


def environment(folder: Path) -> dict[str, str]:
    """Library and source paths."""
    package = next(folder.glob(f"lib/python3.*/site-packages/{PACKAGE}")).absolute()
    sources = HERE.parents[1] / "src"
    return {"LD_LIBRARY_PATH": f"{folder.absolute()}:{package}", "PYTHONPATH": str(sources), "PATH": "/usr/bin:/bin"}


def run(command: list[str], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{Path(command[0]).name} {' '.join(command[1:4])}: {words[-1][:300]}")


def main() -> int:
    folder, *pip_options = sys.argv[1:]
    place = Path(folder)
    try:
        make(place, pip_options)
    except (OSError, StopIteration, compile_native.NotBuiltError) as error:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        reason = str(error) or "the packages are not laid out as expected"
        (place / REASON).write_text(reason + "\n", encoding="utf-8")
        sys.stderr.write(f"NVIDIA's parser cannot be had here: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
