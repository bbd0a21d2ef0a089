"""Compare an export with its source, in a process of its own.

The process returns all memory when it ends, which onnxruntime does not do before; a crash in native code ends only this
process; and it loads the folder from disk, as a user does.
"""

from topw_deploy.export.verification.in_subprocess import recheck, run_checks, verify_in_subprocess
from topw_deploy.export.verification.results import Outcome

__all__ = ["Outcome", "recheck", "run_checks", "verify_in_subprocess"]
