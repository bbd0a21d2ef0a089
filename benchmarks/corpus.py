"""Gather the bundled model's text: Python's own documentation.

The documents are, in this order: reference topics (`pydoc_data.topics`), docstrings of built-in modules, and docstrings
of the standard library, parsed with `ast`. The text is the same for all runs of one Python release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.tiny.corpus import clean, topic_sections

# Folders that are left out, as are folders whose name starts with "config-": tests, internals of applications,
# generated tables and installed packages.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
    }
)
# Built-in modules, which every platform can import without running Python code.
CORE_MODULES = ("builtins", "_functools", "_io", "gc", "itertools", "sys", "time")
SHORTEST_DOCUMENT = 60  # characters
LONGEST_SIGNATURE = 400  # characters; longer ones are mostly tables
LONG_PARAGRAPH = 80  # characters; documents that share a paragraph of this length are taken for copies
HELD_OUT_PERCENT = 5

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. No long paragraph is both in `train` and in `held_out`."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the SHA-256 of each document, in order."""
        total = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            total.update(hashlib.sha256(document.encode()).digest())
        return total.hexdigest()


def gather_corpus() -> Corpus:
    """Gather, clean and deduplicate the documentation, and split it into training and held-out documents."""
    return split_documents([*topic_sections(), *core_docstrings(), *library_docstrings()])


def split_documents(documents: Iterable[str]) -> Corpus:
    """Drop short documents and exact copies, and hold out some documents, chosen by their hash.

    A held-out document shares no long paragraph with any other document. Topics overlap and modules copy docstrings; a
    copy in the training text would lower the held-out loss.
    """
    kept = [d for d in dict.fromkeys(documents) if len(d) >= SHORTEST_DOCUMENT]
    uses = Counter(paragraph for document in kept for paragraph in set(long_paragraphs(document)))
    held_out = [d for d in kept if is_held_out_candidate(d) and all(uses[p] == 1 for p in long_paragraphs(d))]
    held_out_set = set(held_out)
    return Corpus(train=tuple(d for d in kept if d not in held_out_set), held_out=tuple(held_out))


def is_held_out_candidate(document: str) -> bool:
    """Whether the document's hash selects it for the held-out part: HELD_OUT_PERCENT of all documents."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def core_docstrings() -> Iterator[str]:
    """Yield the docstrings of CORE_MODULES as Python stubs, one document per class or function."""
    for module in CORE_MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            if inspect.isclass(value) and value.__name__ == name:
                methods = [(n, m) for n, m in sorted(vars(value).items()) if not n.startswith("_")]
                members = [_stub(f"def {n}", m, "    ") for n, m in methods if inspect.isroutine(m)]
                yield "\n\n".join(filter(None, [_stub(f"class {name}", value, ""), *members]))
            elif inspect.isbuiltin(value) and not name.endswith("hook"):  # programs may have replaced hooks
                yield _stub(f"def {name}", value, "")


def _stub(opening: str, value: Any, indent: str) -> str:
    """A built-in class or function with its docstring; "" if it has none."""
    doc = value.__doc__
    if not doc:
        return ""
    signature = getattr(value, "__text_signature__", None)
    if signature:
        # CPython marks the bound argument with $. That of a function is its module, which callers do not pass.
        signature = re.sub(r"\$module(, /)?(, )?", "", signature).replace("$", "")
    elif not opening.startswith("class"):
        signature = "(...)"
    return f"{indent}{opening}{signature or ''}:\n{_quoted(clean(inspect.cleandoc(doc)), indent + '    ')}"


def library_docstrings(root: Path | None = None) -> Iterator[str]:
    """Yield the docstrings of all .py files under `root` (default: the standard library), without importing them."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template or a fixture
        yield from _module_documents(tree, ".".join(parts).removesuffix(".py").removesuffix(".__init__"))


def _module_documents(tree: ast.Module, name: str) -> Iterator[str]:
    doc = ast.get_docstring(tree)
    if doc:
        yield f"{name}\n{'=' * len(name)}\n\n{clean(doc)}"
    for node in tree.body:
        if isinstance(node, _Definition):
            yield _definition_stub(node, "")


def _definition_stub(node: _Definition, indent: str) -> str:
    """A class or function with its docstring and, for a class, its members; "" without any docstring."""
    doc = ast.get_docstring(node)
    inner = indent + "    "
    members = []
    if isinstance(node, ast.ClassDef):
        opening = f"class {node.name}" + (f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else "")
        members = [_definition_stub(member, inner) for member in node.body if isinstance(member, _Definition)]
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        opening = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"
    members = [member for member in members if member]
    if (not doc and not members) or len(opening) > LONGEST_SIGNATURE:
        return ""
    head = f"{indent}{opening}:" + (f"\n{_quoted(clean(doc), inner)}" if doc else "")
    return "\n\n".join([head, *members])


def _quoted(doc: str, indent: str) -> str:
    """`doc` in triple quotes, indented."""
    closing = '\n"""' if "\n" in doc else '"""'
    return textwrap.indent(f'"""{doc}{closing}', indent)


def long_paragraphs(document: str) -> Iterator[str]:
    """Yield the paragraphs of at least LONG_PARAGRAPH characters, with folded whitespace: copies may be indented."""
    for paragraph in document.split("\n\n"):
        folded = " ".join(paragraph.split())
        if len(folded) >= LONG_PARAGRAPH:
            yield folded
