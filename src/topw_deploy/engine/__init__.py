"""Continuous batching: requests of many callers share one session.

A call passes these modules, in this order:

engine: the callers' face: options, `submit`, `stream`, sessions.
request: what a caller holds of its sequences, and the sequences in the engine's thread.
waiting: room for sequences, the thread that hands out events, asyncio callers.
worker: the engine's thread.
scheduler: which sequence has which slot, and what an iteration runs.
prefixes: which tokens slots and snapshots hold, and how prompts reuse them.
batch: the arrays and bindings of the runs.

session_file: files of saved sessions.
"""

from topw_deploy.engine.engine import Engine
from topw_deploy.engine.request import Request
from topw_deploy.engine.session_file import SessionInfo
from topw_deploy.engine.worker import EngineStats

__all__ = ["Engine", "EngineStats", "Request", "SessionInfo"]
