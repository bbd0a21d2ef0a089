"""Measurements that the docs quote: commands, their workers (`*_worker`), and what they share (`common`, `models`)."""
