"""Files that `serve.py` loads in a peer's environment; they import that environment's libraries, and topw_deploy only
where they need it."""
