"""From a language model to one ONNX file that samples by itself: trace -> lower -> graft, then write and verify."""

from topw_deploy.export.pipeline import export_model
from topw_deploy.export.request import ExportReport, ExportRequest

__all__ = ["ExportReport", "ExportRequest", "export_model"]
