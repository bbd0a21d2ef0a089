"""Writes docs/guide/commands.md: the help of every command, as click prints it.

python docs/guide/commands.py        (a test fails while the page and the commands differ)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from topw_deploy.cli.main import COMMANDS, CONTEXT, topw

PAGE = Path(__file__).with_name("commands.md")
_HEAD = """# Commands

Written by `python docs/guide/commands.py` from the commands' own help. `topw-export` is `topw export`. Options may be
spelled with underscores too (`--max_new_tokens`). Results go to stdout, progress and notes to stderr. Exit codes:
0 done, 1 failed, 2 wrong usage or a wrong value of an option, 130 interrupted.

Names from models, files and arguments are printed with the characters escaped that control a terminal (`\\x1b`,
`\\u202e`), in JSON too, which reads back the same. `topw generate` writes text to files and pipes exactly as the model
generated it; on a terminal it escapes these characters as well, but for line feeds and tabs. A closed stdout is
refused before the work: use `/dev/null`.
"""


def helps() -> Iterator[tuple[str, str]]:
    """The name of every command, and what `topw NAME --help` prints, 88 columns wide. A group's commands follow it."""
    root = click.Context(topw, info_name="topw", **_settings())
    for name in COMMANDS:
        command = topw.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, **_settings())
        yield name, command.get_help(context)
        if isinstance(command, click.Group):
            for inner, below in command.commands.items():
                inner_context = click.Context(below, info_name=inner, parent=context, **_settings())
                yield f"{name} {inner}", below.get_help(inner_context)


def page() -> str:
    return _HEAD + "".join(f"\n## topw {name}\n\n```text\n{text}\n```\n" for name, text in helps())


def _settings() -> dict[str, object]:
    return {"terminal_width": 88, "max_content_width": 88, "help_option_names": CONTEXT.get("help_option_names")}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
