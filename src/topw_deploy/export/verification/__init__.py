"""Compare an export with its source in a separate process.

This bounds memory (onnxruntime keeps its allocations), survives native crashes, and loads the folder afresh, like a
user.
"""

from topw_deploy.export.verification.in_subprocess import recheck, run_checks, verify_in_subprocess
from topw_deploy.export.verification.results import Outcome

__all__ = ["Outcome", "recheck", "run_checks", "verify_in_subprocess"]
