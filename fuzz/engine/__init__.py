"""A soak test of the batching engine: random callers, faults and restarts, for as long as one wants.

models: toy models whose logits are the same bits in every batch.
requests: random requests; a new feature adds one function.
callers: what callers do with a request, in threads and in asyncio tasks.
faults: failing and slow runs of the model.
episodes: engines from their creation to their end, and the callers that use them meanwhile.
replay: compares what a caller got with what `TopWModel.generate` draws for the same request alone.
flatness: measures memory, handles and threads, and tests whether they grow.
"""
