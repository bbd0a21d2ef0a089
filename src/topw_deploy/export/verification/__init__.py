"""Comparison of an exported folder with its source, in a process of its own.

The separate process bounds memory (onnxruntime keeps what it allocates), survives a native crash, and loads the folder
as a user's fresh process will.
"""

from topw_deploy.export.verification.in_subprocess import recheck, run_checks, verify_in_subprocess
from topw_deploy.export.verification.results import Outcome

__all__ = ["Outcome", "recheck", "run_checks", "verify_in_subprocess"]
