"""Continuous batching: requests of many callers share one session.

A call passes these modules, in this order:

engine, request, stats: the public classes.
options, seconds: checks of options and times.
capacity: bounds the number of accepted sequences.
worker, inbox: the engine's thread, and how other threads call it.
lifecycle, sequences: the start and end of requests; the thread's records of them.
scheduler: which sequence has which row, and what an iteration runs.
reuse, prefixes: which tokens rows and snapshots hold, and how prompts reuse them.
batch: the arrays and bindings of the runs.
decoding: the sequences of a step and their tokens.
delivery, tasks: the thread that hands events to callers; asyncio callers.

session_file: files of saved sessions.
step_logits: the logits of a step, recomputed for inspection.
"""

from topw_deploy.engine.engine import Engine
from topw_deploy.engine.request import Request
from topw_deploy.engine.session_file import SessionInfo
from topw_deploy.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Request", "SessionInfo"]
