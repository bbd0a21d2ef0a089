"""Export a language model with its sampler to ONNX.

Importing it raises MissingPackageError without the extra [export].
"""

from topw_deploy import install
from topw_deploy.errors import MissingPackageError

try:
    from topw_deploy.export.options import ExportKeywords, ExportReport
    from topw_deploy.export.pipeline import export_model
    from topw_deploy.export.sampler_only import export_sampler
except ModuleNotFoundError as error:
    if install.extra_of(error.name or "") != "export":
        raise
    raise MissingPackageError(install.missing_message("exporting", "export"), name=error.name) from None

__all__ = ["ExportKeywords", "ExportReport", "export_model", "export_sampler"]
