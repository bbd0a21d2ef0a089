"""Chats whose last message the model goes on with."""

from __future__ import annotations

from topw_deploy.errors import PromptError


def continued(rendered: str, last: str) -> str:
    """`rendered`, up to the end of the last message's text, so that an answer continues it.

    Raises PromptError if the template does not show that text.
    """
    place = rendered.rfind(last) if last.strip() else -1
    if place < 0:
        last = last.strip()
        place = rendered.rfind(last) if last else -1
    if place < 0:
        raise PromptError(
            f"the chat template does not show the beginning of the answer, {last!r:.60}; evaluate without "
            "--apply_chat_template, or with another template."
        )
    return rendered[: place + len(last)]
