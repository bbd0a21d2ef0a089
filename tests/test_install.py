"""Install commands in errors work from this package's origin."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from topw_deploy import install
from topw_deploy.errors import MissingPackageError

ROOT = Path(__file__).parents[1]
Elsewhere = Callable[..., None]


@pytest.fixture
def came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Elsewhere:
    """Put the package into site-packages, with this direct_url.json."""

    def set_up(origin: object) -> None:
        info = tmp_path / "topw_deploy-0.1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: topw-deploy\nVersion: 0.1.0\n")
        (info / "direct_url.json").write_text(json.dumps(origin) if origin else "")
        found = importlib.metadata.Distribution.at(info)
        monkeypatch.setattr(install, "_SOURCES", tmp_path)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)

    return set_up


def test_a_clone_is_installed_from_its_own_folder() -> None:
    assert install.requirement("export") == f"-e '{ROOT}[export]'"
    assert install.requirement() == f"-e {ROOT}"
    assert install.install_command("gpu").endswith(f" install -e '{ROOT}[gpu]'")


@pytest.mark.parametrize("made", ["wheel", "folder"])
def test_a_wheel_or_a_folder_is_named_by_its_path(came_from: Elsewhere, tmp_path: Path, made: str) -> None:
    place = tmp_path / "my files" / f"the {made}"
    place.mkdir(parents=True)
    came_from({"url": place.as_uri(), "archive_info": {}})
    assert shlex.split(install.requirement("cpu")) == [f"{place}[cpu]"]
    place.rmdir()
    assert install.requirement("cpu") == "'topw-deploy[cpu]'"


def test_a_repository_and_a_file_on_a_server_are_named_by_their_addresses(came_from: Elsewhere) -> None:
    came_from({"url": "https://host/topw.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert install.requirement("export") == "'topw-deploy[export] @ git+https://host/topw.git@abc'"
    came_from({"url": "https://host/topw.whl", "archive_info": {}})
    assert install.requirement("export") == "'topw-deploy[export] @ https://host/topw.whl'"
    came_from(None)
    assert install.requirement("export") == "'topw-deploy[export]'"


def test_pip_takes_the_name_of_a_wheel_with_an_extra_and_records_where_it_was(
    came_from: Elsewhere, tmp_path: Path
) -> None:
    wheel = tmp_path / "topw_deploy-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "topw_deploy-0.1.0.dist-info"
        file.writestr("topw_deploy/__init__.py", "")
        lines = "Metadata-Version: 2.1\nName: topw-deploy\nVersion: 0.1.0\nProvides-Extra: export\n"
        file.writestr(f"{info}/METADATA", lines)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    came_from({"url": wheel.as_uri()})
    command = f"{shlex.quote(sys.executable)} -m pip install {install.requirement('export')}"
    offline = ["--no-index", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*shlex.split(command), *offline], check=True, capture_output=True)
    recorded = json.loads((tmp_path / "site" / info / "direct_url.json").read_text())
    assert recorded["url"] == wheel.as_uri()


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
