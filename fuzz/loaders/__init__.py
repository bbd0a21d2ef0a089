"""Random files and requests through every loader: only errors of topw_deploy.errors may come out."""
