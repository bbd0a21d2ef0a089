"""Files for `serve.py`. They import a peer's libraries, and topw_deploy only where needed."""
