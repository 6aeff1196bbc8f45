"""A world of plain functions: a calculator, and a tool that checks its results."""

import ast
import operator

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_LARGEST = 10**12


def calculate(expression: str) -> str:
    """Work out an expression of whole numbers.

    Args:
        expression: whole numbers, + - * // % and parentheses, such as "(17 + 4) * 3".
    """
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def divides(divisor: int, number: int) -> bool:
    """Say whether one whole number divides another.

    Args:
        divisor: the smaller number, not 0.
        number: the larger number.
    """
    return number % divisor == 0


def _value(node: ast.expr) -> int:
    """Return the value of a tree of allowed operations; nothing is ever evaluated as code."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _bounded(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("only whole numbers, + - * // % and parentheses are allowed")


def _bounded(value: int) -> int:
    if abs(value) > _LARGEST:
        raise ValueError(f"numbers beyond {_LARGEST} are not worked out")
    return value
