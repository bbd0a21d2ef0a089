"""Continuous batching: requests of many callers share one session.

engine, request: public classes.
options: checked options.
scheduler: which sequence has which row; what an iteration runs.
prefixes: which tokens rows and snapshots hold.
reuse: starts prompts after a known prefix.
session_file: saved sessions.
batch: the arrays and bindings of the runs.
worker: the engine's thread.
room: the bound on accepted sequences.
seconds: checks of timeouts.
tasks: asyncio.
"""

from topw_deploy.engine.engine import Engine, EngineStats
from topw_deploy.engine.request import Request
from topw_deploy.engine.session_file import SessionInfo

__all__ = ["Engine", "EngineStats", "Request", "SessionInfo"]
