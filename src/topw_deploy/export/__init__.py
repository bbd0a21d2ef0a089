"""Export a language model with its sampler to ONNX.

Importing it raises ExportError in Python older than 3.11, and MissingPackageError without the extra [export].
"""

import sys

from topw_deploy import install
from topw_deploy.errors import ExportError, MissingPackageError

if sys.version_info < install.EXPORT_PYTHON:
    raise ExportError(install.why_not_this_python("exporting"))

try:
    from topw_deploy.export.pipeline import export_model
    from topw_deploy.export.request import ExportReport, ExportRequest, GraphOptions, SamplerOptions, WeightOptions
    from topw_deploy.export.source.resolve import HubOptions
except ModuleNotFoundError as error:
    if install.extra_of(error.name or "") != "export":
        raise
    raise MissingPackageError(install.missing_message("exporting", "export"), name=error.name) from None

__all__ = [
    "ExportReport",
    "ExportRequest",
    "GraphOptions",
    "HubOptions",
    "SamplerOptions",
    "WeightOptions",
    "export_model",
]
