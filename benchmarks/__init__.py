"""The measurements that the docs quote, their workers (`*_worker`), and shared code (`common`, `models`)."""
