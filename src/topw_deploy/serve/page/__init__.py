"""The page at `/`: one HTML document that contains its style and scripts, and calls this server only.

page.html has marks, such as /*style*/, which style.css, the scripts and the rules replace. The header
Content-Security-Policy has the hashes of style and script, so browsers never run text of a model or a user.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from topw_deploy.runtime.rule_settings import USUAL
from topw_deploy.sampling.rules import RULES, TOP_W
from topw_deploy.serve.service import service_of

SCRIPTS = ("dom.js", "api.js", "settings.js", "crop.js", "plot.js", "runs.js", "main.js")
"""The files of the page's one script, in their order. They share one scope."""


async def page(request: Request) -> Response:
    """Answer the page. It holds no secrets: if the server has keys, each call of the page needs one."""
    document, policy = _document(bool(service_of(request).options.api_keys))
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(document, media_type="text/html", headers=headers)


@cache
def _document(needs_key: bool) -> tuple[str, str]:
    """Returns (the document, its Content-Security-Policy).

    needs_key: whether the server has keys.
    """
    style = _read("style.css")
    script = '"use strict";\n' + "\n".join(_read(name) for name in SCRIPTS)
    document = _read("page.html")
    rules = json.dumps(_rule_fields()).replace("<", "\\u003c")
    for mark, content in (
        ("/*style*/", style),
        ("/*script*/", script),
        ("/*rules*/", rules),
        ("/*keys*/", str(int(needs_key))),
    ):
        document = document.replace(mark, content)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return document, "; ".join(f"{name} {value}" for name, value in policy.items())


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _rule_fields() -> list[dict[str, Any]]:
    """The sampling rules other than Top-W, with their parameters, for the page's form."""
    return [
        {
            "name": rule.name,
            "values": [
                {"name": each.name, "bound": each.bound, "value": USUAL.get(each.name, each.default)}
                for each in rule.values
            ],
        }
        for rule in RULES.values()
        if rule is not TOP_W
    ]
