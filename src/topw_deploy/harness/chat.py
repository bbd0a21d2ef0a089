"""Chats whose last message is the beginning of the model's answer."""

from __future__ import annotations

from topw_deploy.errors import PromptError


def continued(rendered: str, last: str) -> str:
    """Cut `rendered` after the last message's text, so that the answer continues this text.

    Raises PromptError if the rendered chat does not contain that text.
    """
    place = rendered.rfind(last) if last.strip() else -1
    if place < 0:
        last = last.strip()
        place = rendered.rfind(last) if last else -1
    if place < 0:
        raise PromptError(
            f"the rendered chat does not contain the beginning of the answer, {last!r:.60}; evaluate without "
            "--apply_chat_template, or with another template."
        )
    return rendered[: place + len(last)]
