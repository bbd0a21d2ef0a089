"""What several test folders share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, exported once with default options."""
    from topw_deploy.export import ExportRequest, export_model

    output = tmp_path_factory.mktemp("demo") / "export"
    export_model(ExportRequest(model="demo", output=output, verify=False))
    return output
