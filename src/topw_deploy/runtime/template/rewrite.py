"""Rewrite a parsed template so that it counts its work.

Jinja compiles loops, comparisons, literals, slices and `~` to plain Python, which an environment cannot intercept. They
are wrapped in filters whose names begin with a space, so that templates cannot name them.
"""

# ruff: noqa: N802, N815  # the names by which Jinja calls a visitor
from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.visitor import NodeTransformer

from topw_deploy.runtime.template.meter import current

_BOUNDED_BY_EITHER = frozenset({"eq", "ne", "gt", "gteq", "lt", "lteq"})  # comparisons end with the shorter operand


def rewrite(template: nodes.Template) -> nodes.Template:
    """Modify `template` in place. Raises TemplateAssertionError for nodes that cannot be counted."""
    _Rewriter().visit(template)
    return template


def _step(cost: Any) -> bool:
    if isinstance(cost, int):
        current().step(cost)
    return True


def _make(value: Any) -> Any:
    return current().make(value)


def _read(value: Any) -> Any:
    current().read(value)
    return value


def _join(values: list[Any]) -> str:
    meter = current()
    return meter.join(map(meter.text, values))


COUNTING = {" step": _step, " make": _make, " read": _read, " join": _join}


def _call(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _cost(parts: list[nodes.Node]) -> int:
    return 1 + sum(1 + sum(1 for _ in part.find_all(nodes.Node)) for part in parts)


def _is_short(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and not (isinstance(node.value, str) and len(node.value) > 64)


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = _cost(list(node.body))
        if node.test is not None:
            counted = _call(" step", nodes.Const(_cost([node.test]), lineno=node.lineno))
            self.generic_visit(node)
            node.test = nodes.And(counted, node.test, lineno=node.lineno)
        else:
            self.generic_visit(node)
        return self._counted(node, cost)

    def _visit_body(self, node: Any) -> nodes.Node:
        cost = _cost(list(node.body))
        self.generic_visit(node)
        return self._counted(node, cost)

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def _counted(self, node: Any, cost: int) -> nodes.Node:
        step = _call(" step", nodes.Const(cost, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call(" make", node) if node.items and getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = _visit_literal

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call(" read", node.key)  # hashing reads it
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(" join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operators = {operand.op for operand in node.ops}
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and operators <= _BOUNDED_BY_EITHER and any(map(_is_short, sides)):
            return node
        node.expr = _call(" read", node.expr)
        for operand in node.ops:
            operand.expr = _call(" read", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call(" make", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateAssertionError("autoescape has no meaning in a prompt", node.lineno)
