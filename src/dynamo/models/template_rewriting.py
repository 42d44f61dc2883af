"""Rewriting of a chat template's syntax tree, so that its code calls `template_sandbox.OPERATIONS`.

Loops draw from the budget, and operations that multiply a value check its size. Sums that are only
printed stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.visitor import NodeTransformer

MAX_UNCHECKED_OPERANDS = 4
MAX_CONCATENATED = 8
LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})

ARITHMETIC = {
    nodes.Add: "_add", nodes.Mul: "_multiply", nodes.Pow: "_power", nodes.Mod: "_modulo",
}  # fmt: skip
"""The operations that may make a larger value than their operands."""


class LoopCodeGenerator(CodeGenerator):
    """Reads attributes of `loop` directly, since they need no check for safety."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "loop":
            self.visit(node.node, frame)
            self.write(f".{node.attr}")
        else:
            super().visit_Getattr(node, frame)


class BoundingTransformer(NodeTransformer):
    """Inserts calls of `template_sandbox.OPERATIONS` into a template's tree."""

    _captures = 0

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise ValueError(f"line {node.lineno}: autoescape is not supported")  # contexts share it

    visit_EvalContextModifier = visit_ScopedEvalContextModifier  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        for statement in node.body:
            _mark_loop_attributes(statement)
        self.generic_visit(node)
        node.iter = _operation("_counted", cast("nodes.Expr", node.iter))
        return _count_steps(node) if node.recursive else node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return _count_steps(self.visit_FilterBlock(node))

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.visit_FilterBlock(node)
        node.filter = _operation("_bounded", cast("nodes.Expr", node.filter), lineno=node.lineno)
        return node

    def visit_FilterBlock(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        """Visit a statement whose output is captured before it is joined."""
        self._captures += 1
        self.generic_visit(node)
        self._captures -= 1
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """Leave short sums of texts that are only printed as they are."""
        for number, child in enumerate(node.nodes):
            if isinstance(child, nodes.TemplateData | nodes.Const):
                continue
            if _is_text(child) and not self._captures:
                node.nodes[number] = self._visit_sum(child)
            else:
                node.nodes[number] = _operation("_printed", self.visit(child))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        if _is_text(node):
            return _operation("_bounded", self._visit_sum(node))
        return self.visit_Mul(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return _operation("_bounded", self._visit_sum(node))

    def visit_Mul(self, node: nodes.BinExpr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _operation(ARITHMETIC[type(node)], node.left, node.right)

    visit_Pow = visit_Mod = visit_Mul  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            searched = operand.op in {"in", "notin"}
            if not isinstance(operand.expr, nodes.Const) and not (
                isinstance(node.expr, nodes.Const) and not searched
            ):
                operand.expr = _operation("_visited", operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if any(not isinstance(argument, nodes.Const) for argument in node.args):
            node.node = _operation("_visited", node.node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _operation("_bounded", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.Literal) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        plain = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if plain else _operation("_container", node)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        captured = node.ctx == "load" and node.name in {"varargs", "kwargs"}
        return _operation("_container", node) if captured else node

    def _visit_sum(self, node: Any) -> Any:
        """Visit the operands of a sum. Long sums are checked in parts."""
        if isinstance(node, nodes.Concat):
            return self._visit_concat(node)
        count = 0
        for name in ("left", "right"):
            operand = getattr(node, name)
            is_sum = isinstance(operand, nodes.Add)
            operand = self._visit_sum(operand) if is_sum else self.visit(operand)
            count += _count_operands(operand)
            if count > MAX_UNCHECKED_OPERANDS:
                operand = _operation("_bounded", operand)
            setattr(node, name, operand)
        return node

    def _visit_concat(self, node: nodes.Concat) -> nodes.Concat:
        """Visit the operands of a concatenation. A long one becomes nested short ones."""
        operands: list[nodes.Expr] = [
            part if isinstance(part, nodes.Const) else _operation("_printed", self.visit(part))
            for part in node.nodes
        ]
        while len(operands) > MAX_CONCATENATED:
            first = nodes.Concat(operands[:MAX_CONCATENATED], lineno=node.lineno)
            operands[:MAX_CONCATENATED] = [_operation("_bounded", first)]
        node.nodes = operands
        return node


def _is_text(node: nodes.Node) -> bool:
    """Whether the value of a sum is a text, because one of its operands is."""
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, nodes.Const):
        return isinstance(node.value, str)
    return isinstance(node, nodes.Concat)


def _count_operands(node: nodes.Node) -> int:
    if isinstance(node, nodes.Add):
        return _count_operands(node.left) + _count_operands(node.right)
    return 0 if isinstance(node, nodes.Const) else 1


def _operation(
    name: str, value: nodes.Expr | None, *args: nodes.Expr, lineno: int = 0
) -> nodes.Filter:
    line = lineno if value is None else value.lineno
    return nodes.Filter(value, name, list(args), [], None, None, lineno=line)


def _count_steps(node: Any) -> nodes.Node:
    step = nodes.ExprStmt(_operation("_step", nodes.Const(None, lineno=node.lineno)))
    node.body.insert(0, step)
    return node  # type: ignore[no-any-return]


def _mark_loop_attributes(node: nodes.Node) -> None:
    """Mark attributes of the special variable `loop` for `LoopCodeGenerator`."""
    if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block):
        return  # here `loop` may be another variable
    if isinstance(node, nodes.Getattr) and node.attr in LOOP_ATTRIBUTES:
        name = node.node
        if isinstance(name, nodes.Name) and name.name == "loop" and node.ctx == "load":
            node.ctx = "loop"
    for child in node.iter_child_nodes():
        _mark_loop_attributes(child)
