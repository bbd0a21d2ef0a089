"""Install commands in errors name this package and its extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from topw_deploy import install
from topw_deploy.errors import MissingPackageError

ROOT = Path(__file__).parents[1]


def test_a_clone_is_installed_from_its_own_folder() -> None:
    assert install.requirement("export") == f"-e '{ROOT}[export]'"
    assert install.requirement() == f"-e {ROOT}"
    assert install.install_command("gpu").endswith(f" install -e '{ROOT}[gpu]'")


def test_an_installed_package_is_named_without_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "_SOURCES", tmp_path)
    assert install.requirement("export") == "'topw-deploy[export]'"


def test_pip_is_the_one_of_this_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, other, uv = Path(sys.executable).with_name("pip"), tmp_path / "pip", tmp_path / "uv"
    monkeypatch.setattr(install.shutil, "which", lambda name: {"pip": str(beside)}.get(name))
    assert install.pip_command("install") == "pip install"
    monkeypatch.setattr(install.shutil, "which", lambda name: {"pip": str(other), "uv": str(uv)}.get(name))
    assert install.pip_command("uninstall") == f"{sys.executable} -m pip uninstall"
    monkeypatch.setattr(install, "is_importable", lambda module: False)
    assert install.pip_command("install") == f"uv pip install --python {sys.executable}"


def test_the_extras_are_those_of_the_project_file() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - set(install.MODULES) == {"gpu", "tensorrt", "optimum", "all", "dev"}
    for extra, modules in install.MODULES.items():
        named = {re.split(r"[\[<>=]", wanted)[0] for wanted in extras[extra]}
        assert set(modules) == named - {"topw-deploy"}
        assert extra == "ray" or all(map(install.is_importable, modules.values()))  # ray is not in [dev]


@pytest.mark.parametrize(
    ("absent", "names"), [(["torch"], "torch, which is"), (["torch", "onnx_ir"], "torch and onnx-ir, which are")]
)
def test_the_message_names_every_missing_package(
    monkeypatch: pytest.MonkeyPatch, absent: list[str], names: str
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module not in absent)
    with pytest.raises(MissingPackageError) as raised:
        install.require("exporting", "export")
    assert str(raised.value) == f"exporting needs {names} not installed; run: {install.install_command('export')}"


def test_beside_onnxruntime_gpu_the_message_names_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module != "torch")
    monkeypatch.setattr(install, "installed_version", lambda name: "1.31" if name == "onnxruntime-gpu" else None)
    found, command = install.install_advice("exporting", "export")
    assert "activate another environment first" in found
    assert command == f"pip install -e '{ROOT}[export]'"


def test_no_text_installs_the_package_from_an_index() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a clone")
    wrong = re.compile(r"pip install (?:-U |--\S+ )*['\"]?topw-deploy")
    names = [name for name in tracked.stdout.splitlines() if name.endswith((".md", ".py", "Makefile"))]
    assert [name for name in names if (ROOT / name).is_file() and wrong.search((ROOT / name).read_text("utf-8"))] == []


@pytest.mark.parametrize("page", ["README.md", "docs/guide/install.md"])
def test_the_wheels_that_a_page_names_are_the_ones_that_make_wheels_writes(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "Makefile").read_text()
    processors = re.findall(r"for arch in (.*);", recipe)[0].split()
    tags = {"any", *(f"manylinux_2_17_{name}" for name in processors)}
    assert "--plat-name=manylinux_2_17_$$arch" in recipe
    named = set(re.findall(r"topw_deploy-([\d.]+)-py3-none-(\w+)\.whl", (ROOT / page).read_text("utf-8")))
    assert named
    assert {version for version, _ in named} == {project["version"]}
    assert {tag for _, tag in named} <= tags
