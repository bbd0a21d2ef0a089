"""Comparing an exported folder with what it was made from, in a process of its own.

A process of its own because onnxruntime keeps memory, because a native crash must not take the export with it, and
because what is checked is then what a user's fresh process will load.
"""

from topw_deploy.export.verification.parent import VerifyOutcome, recheck, run_checks, tick_line, verify_in_subprocess

__all__ = ["VerifyOutcome", "recheck", "run_checks", "tick_line", "verify_in_subprocess"]
