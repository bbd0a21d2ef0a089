from __future__ import annotations

from pathlib import Path

import pytest

from topw_deploy.plugins import shared_library as library
from topw_deploy.plugins.shared_library import library_path


@pytest.fixture(scope="session")
def native_library() -> Path:
    """Skips the test if the library is not built."""
    path = library_path()
    if path is None:
        pytest.skip(f"no native sampler: {library.why_absent()}")
    return path
