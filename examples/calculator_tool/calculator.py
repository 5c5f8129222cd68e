"""A calculator as a tool: arithmetic, and nothing else that Python can do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
MOST_CHARACTERS = 200
LARGEST = 10**30


def calculate(expression: str) -> str:
    """Calculates an arithmetic expression, such as (48 / 2 + 48) * 3, and returns its value.

    Args:
        expression: numbers with + - * / // % and parentheses
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
    value = _value(ast.parse(expression.replace(",", ""), mode="eval").body)
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """Exact, so that thirds added up are a whole."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operate = OPERATORS[type(node.op)]
        value = Fraction(operate(_value(node.left), _value(node.right)))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
    if abs(value) > LARGEST or value.denominator > LARGEST:
        raise ValueError("the numbers become too large")
    return value
