from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from tests.examples.cpp_host import FORMS, HERE, Host, compiled, host_of, library_of
from tests.support.toy_model import Toy, export
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="session")
def ort_library() -> Path:
    return library_of(Path(ort.__file__).parent)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the project's own declarations."""
    return compiled(tmp_path_factory.mktemp("host") / "topw_host", "-O2")


@pytest.fixture(scope="session")
def host(program: Path, ort_library: Path) -> Host:
    return host_of(program, ort_library)


@pytest.fixture(scope="session")
def tokenizers_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C interface, over the Python package."""
    output = tmp_path_factory.mktemp("tokenizers") / "libtokenizers_c.so"
    return compiled(output, "-O1", "-shared", "-fPIC", source=HERE / "tokenizers_stand_in.cpp")


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="session")
def folders(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toys")
    return {form: export(folder / form, toy, form=form, with_mass=form == "scatter") for form in FORMS}
