"""Export a language model with its sampler to ONNX.

Importing it raises MissingPackageError without the extra [export].
"""

from topw_deploy import install
from topw_deploy.errors import MissingPackageError

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
