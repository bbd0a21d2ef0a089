"""Pass random files and requests to every loader, which may raise only errors of topw_deploy.errors."""
