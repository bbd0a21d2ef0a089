"""Build the native library, which pyproject.toml cannot describe, if there is a C++ compiler.

The package works without it: the exported graph has a function of standard operators for the same node.
TOPW_BUILD_NATIVE=0 leaves the library out, TOPW_BUILD_NATIVE=1 fails if it cannot be built, CXX names the compiler.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PLUGINS = "topw_deploy/plugins"

sys.path.insert(0, str(ROOT / "src"))
from topw_deploy.plugins.compile_native import LIBRARY_NAME, NotBuiltError, compile_native  # noqa: E402


class TopWDistribution(Distribution):
    """A distribution that is for one platform only if the library was built."""

    has_library = False

    def has_ext_modules(self) -> bool:
        return self.has_library


class BuildPython(build_py):
    """Build the Python files, then the library beside them (in the source tree for an editable installation)."""

    def run(self) -> None:
        super().run()
        base = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        output = base / PLUGINS / LIBRARY_NAME
        try:
            compile_native(output)
            self.distribution.has_library = True
        except NotBuiltError as reason:
            if os.environ.get("TOPW_BUILD_NATIVE") == "1":
                raise SystemExit(f"topw-deploy: the native sampler was not built: {reason}") from None
            sys.stderr.write(f"topw-deploy: left the native sampler out: {reason}; models run their own function.\n")


class Wheel(bdist_wheel):
    """Tag the wheel py3-none-PLATFORM with the library, which does not depend on Python, else py3-none-any."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_library
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return "py3", "none", "any"
        return "py3", "none", super().get_tag()[2]


setup(distclass=TopWDistribution, cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel})
