"""Arithmetic that a rule may ask for: numbers, names, + - * / // %, comparisons, a few calls.

The text is parsed, never executed: anything else in it is refused when the rule is loaded.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_UNITS = {"B": 0, "KB": 1, "KIB": 1, "MB": 2, "MIB": 2, "GB": 3, "GIB": 3, "TB": 4, "TIB": 4}

_BINARY: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.AST], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
Value = float | int | str


def _size(amount: Value, unit: Value) -> float:
    return _number(amount) * 1024.0 ** _UNITS[str(unit).upper()]


def _number(value: Value) -> float:
    return float(value.replace(",", "")) if isinstance(value, str) else float(value)


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "bytes": _size,  # bytes(58.15, "GiB")
    "round": lambda value, digits=0: round(_number(value), int(digits)),
    "min": lambda *values: min(map(_number, values)),
    "max": lambda *values: max(map(_number, values)),
    "abs": lambda value: abs(_number(value)),
}


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def names_in(text: str) -> set[str]:
    """Return the names that an expression uses; raise ValueError for what is no arithmetic."""
    try:
        tree = _parse(text)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no arithmetic") from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
                raise ValueError(f"{text!r} calls something else than {sorted(_FUNCTIONS)}")
        elif not isinstance(node, _ALLOWED):
            raise ValueError(f"{text!r}: {type(node).__name__} is no arithmetic")  # noqa: TRY004
    return names - set(_FUNCTIONS)


_ALLOWED = (
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.USub,
    ast.Compare,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.Load,
    *_BINARY,
    *_COMPARE,
)


def evaluate(text: str, values: Mapping[str, Value]) -> float | bool:
    """Compute an expression; raise ValueError where a name is missing or is no number."""
    try:
        result = _evaluate(_parse(text), values)
    except (KeyError, ZeroDivisionError, OverflowError, TypeError) as error:
        raise ValueError(f"{text!r} cannot be computed: {error!r}") from error
    if isinstance(result, str):
        return _number(result)
    return result


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Value:
    match node:
        case ast.Constant(value=value):
            return value  # type: ignore[return-value]  # checked when the rule was loaded
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(_evaluate(operand, values))
        case ast.BinOp(left=left, op=op, right=right):
            function = _BINARY[type(op)]
            return function(_number(_evaluate(left, values)), _number(_evaluate(right, values)))
        case ast.BoolOp(op=op, values=parts):
            whole = all if isinstance(op, ast.And) else any
            return whole(bool(_evaluate(part, values)) for part in parts)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            compare = _COMPARE[type(op)]
            return compare(_number(_evaluate(left, values)), _number(_evaluate(right, values)))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_evaluate(argument, values) for argument in arguments))
    raise ValueError(f"{ast.dump(node)} is no arithmetic")
