"""From a language model to one ONNX file that samples by itself: trace -> lower -> graft, then write and verify.

Raises ExportError where Python is older than 3.11, with which nothing of this is tested.
"""

import platform
import sys

from topw_deploy.errors import ExportError

if sys.version_info < (3, 11):
    raise ExportError(
        f"exporting needs Python 3.11 or newer, and this is {platform.python_version()}; export on another machine and "
        "copy the folder to this one."
    )

from topw_deploy.export.pipeline import export_model
from topw_deploy.export.request import ExportReport, ExportRequest

__all__ = ["ExportReport", "ExportRequest", "export_model"]
