"""Static sites that run an exported model in the browser, without a server (docs/guide/web.md).

The folder `site` has the page and the JavaScript library `topw`, which examples/node uses, too.
"""

from topw_deploy.web.site import Site, check_runs, notes, write_site

__all__ = ["Site", "check_runs", "notes", "write_site"]
