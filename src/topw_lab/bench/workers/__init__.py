"""The workers for other libraries, and `serve.py`, the program that runs a worker.

They run in other environments, so they import topw_deploy only where they need it.
"""
