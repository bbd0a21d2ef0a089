from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from tests.examples.cpp_host import FORMS, HERE, Host, compiled, host_of, library_of
from tests.support.shared import made_once
from tests.support.toy_model import Toy, export
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="session")
def ort_library() -> Path:
    return library_of(Path(ort.__file__).parent)


def compiled_once(factory: pytest.TempPathFactory, name: str, *flags: str, source: Path | None = None) -> Path:
    def make(folder: Path) -> None:
        folder.mkdir()
        compiled(folder / name, *flags, source=source)

    return made_once(factory, f"cpp-{name}", make) / name


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the project's own declarations."""
    return compiled_once(tmp_path_factory, "topw_host", "-O2")


@pytest.fixture(scope="session")
def host(program: Path, ort_library: Path) -> Host:
    return host_of(program, ort_library)


@pytest.fixture(scope="session")
def tokenizers_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C interface, over the Python package."""
    flags = ("-O1", "-shared", "-fPIC")
    return compiled_once(tmp_path_factory, "libtokenizers_c.so", *flags, source=HERE / "tokenizers_stand_in.cpp")


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="session")
def folders(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toys")
    return {form: export(folder / form, toy, form=form, with_mass=form == "scatter") for form in FORMS}
