"""The native library inside the package, which pyproject.toml cannot describe: built where a C++ compiler is there.

Everything else about the package is in pyproject.toml. Without the library the package is whole: the exported file
carries a function of standard operators for the same node. TOPW_BUILD_NATIVE=0 leaves it out, TOPW_BUILD_NATIVE=1 fails
where it cannot be built, CXX names the compiler.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PLUGINS = "topw_deploy/plugins"
BUILD = runpy.run_path(str(ROOT / "src" / PLUGINS / "build.py"))


class TopWDistribution(Distribution):
    """Knows whether the library was built: only then is the package for one platform."""

    has_library = False

    def has_ext_modules(self) -> bool:
        return self.has_library


class BuildPython(build_py):
    """The Python files, then the library beside them: in the source tree for an editable installation."""

    def run(self) -> None:
        super().run()
        base = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        output = base / PLUGINS / BUILD["LIBRARY_NAME"]
        try:
            BUILD["build"](output)
            self.distribution.has_library = True
        except BUILD["NotBuiltError"] as reason:
            if os.environ.get("TOPW_BUILD_NATIVE") == "1":
                raise SystemExit(f"topw-deploy: the native sampler was not built: {reason}") from None
            sys.stderr.write(f"topw-deploy: left the native sampler out: {reason}; models run their own function.\n")


class Wheel(bdist_wheel):
    """py3-none-PLATFORM with the library, which knows no Python; py3-none-any without."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_library
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return "py3", "none", "any"
        return "py3", "none", super().get_tag()[2]


setup(distclass=TopWDistribution, cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel})
