"""Soak of the batching engine: random callers, faults and restarts, for as long as wanted.

models: toy models whose logits are the same bits in every batch.
requests: random requests; a new feature adds one function.
callers: what callers do with a request, in threads and asyncio tasks.
faults: provider errors and slow runs.
episodes: the life of engines, from their options to their end.
replay: comparison with `TopWModel.generate` alone.
flatness: memory, handles and threads, and the test of their slopes.
"""
