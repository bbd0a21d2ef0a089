"""Python's language reference, as text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HEADING = re.compile(r"^(?P<title>\S[^\n]*)\n(?P<rule>([*=\-^~\"])\3{2,})[ ]*$", re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def topic_sections() -> Iterator[str]:
    """Yield pydoc's language reference, one document per section."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield from split_sections(clean(topics[name]))


def split_sections(text: str) -> Iterator[str]:
    """Split a text before its underlined headings, and underline all headings with "="."""
    headings = list(_HEADING.finditer(text))
    starts = [heading.start() for heading in headings]
    if not starts or starts[0] > 0:
        yield text[: starts[0] if starts else len(text)].strip()
    for heading, end in zip(headings, [*starts[1:], len(text)], strict=True):
        title, body = heading["title"].strip(), text[heading.end() : end].strip()
        yield f"{title}\n{'=' * len(title)}\n\n{body}" if body else ""


def clean(text: str) -> str:
    """Remove control characters, tabs, trailing spaces and repeated empty lines."""
    text = _CONTROL.sub("", text.expandtabs().replace("\r\n", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")
