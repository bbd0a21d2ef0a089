"""Requests of many callers over one session: continuous batching.

engine, request: public classes.
options: checked options.
scheduler: which sequence has which row; what an iteration runs.
prefixes: which tokens rows and snapshots hold.
reuse: prompts that start behind a known prefix.
session_file: saved sessions.
batch: the arrays and bindings of the runs.
worker: the thread.
room: the bound on accepted sequences.
seconds: times that callers give.
tasks: asyncio.
"""

from topw_deploy.engine.engine import Engine, EngineStats
from topw_deploy.engine.request import Request
from topw_deploy.engine.session_file import SessionInfo

__all__ = ["Engine", "EngineStats", "Request", "SessionInfo"]
