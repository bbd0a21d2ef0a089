"""Continuous batching: requests of many callers share one session.

engine, request, stats: public classes.
capacity: the bound on accepted sequences.
intake: from a call's arguments to sequences.
options: checked options.
scheduler: which sequence has which row; what an iteration runs.
prefixes: which tokens rows and snapshots hold.
reuse: starts prompts after a known prefix.
session_file: saved sessions.
batch: the arrays and bindings of the runs.
worker, inbox: the engine's thread, and how other threads call it.
lifecycle, deadlines: the start and end of requests.
decoding: the sequences of a step and their tokens.
delivery: the thread that hands events to callers.
job: the engine's records of sequences and requests.
step_logits: the logits of a step, recomputed for inspection.
seconds: checks of timeouts.
flag: an event that a signal handler may wait for.
tasks: asyncio.
"""

from topw_deploy.engine.engine import Engine
from topw_deploy.engine.request import Request
from topw_deploy.engine.session_file import SessionInfo
from topw_deploy.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Request", "SessionInfo"]
