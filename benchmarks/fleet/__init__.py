"""A simulation of many replicas of the engine, from measured costs of its runs. See docs/guide/scale.md.

costs: seconds of a step by width, and of a chunk by length; measured on an engine.
workload: arrival times, prompts and lengths.
replica: one simulated engine, iteration by iteration.
simulate: replicas behind a router.
compare: the same requests on a real engine and on a simulated one.
"""
