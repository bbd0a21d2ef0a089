"""Files that `serve.py` runs. They import a peer's libraries, and topw_deploy only where needed."""
