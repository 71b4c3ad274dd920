"""Which error codes a test file really holds a result against; a code that only stands somewhere in it counts nowhere.

Counted are the texts that an assertion compares with a code: `.code`, `["code"]`, what a helper of the tests returns of
these; and the table of faults (`@fault`). Not counted is a code that the test has made itself, by FinetuneError or by what
it tells a stand-in.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
MAKERS = {"FinetuneError", "boundary"}
STANDIN_MAKES = re.compile(r"(^|,)(fail:|refuse(-with|,|$))")  # codes that nothing of the product has raised
HOLDING = (ast.Eq, ast.In, ast.LtE, ast.GtE)


def met(paths: Iterable[Path]) -> set[str]:
    """Return the texts that results' codes are held against in these test files."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    shared = [tree for path, tree in trees.items() if not path.name.startswith("test_")]
    found: set[str] = set()
    for tree in trees.values():
        found |= _met_in_file(tree, _learnt([*shared, tree]))
    return found


def _learnt(trees: list[ast.Module]) -> set[str]:
    """Return the names of functions, fixtures among them, that return a code, or codes."""
    helpers: set[str] = set()
    for tree in trees * 2:  # twice: a helper may stand on another one
        for function in _outermost(tree):
            names = _telling_names(function, helpers)
            ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield)]
            if any(_tells(value, helpers, names) for value in ends if value is not None):
                helpers.add(function.name)
    return helpers


def _outermost(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (member for member in members if isinstance(member, Function))


def _telling_names(function: Function, helpers: set[str]) -> set[str]:
    """Return the variables that were given a code, or several."""
    names: set[str] = set()
    for node in ast.walk(function):
        names |= {name for name, value in _assigned(node) if _tells(value, helpers, names)}
    return names


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def _tells(node: ast.expr, helpers: set[str], names: set[str]) -> bool:
    """Whether an expression is a code, or holds nothing but codes."""

    def tells(part: ast.expr) -> bool:
        return _tells(part, helpers, names)

    match node:
        case ast.Attribute():
            return node.attr == "code"
        case ast.Name():
            return node.id in names
        case ast.Subscript():
            place = node.slice
            is_place = isinstance(place, ast.Slice | ast.UnaryOp) or not isinstance(_value(place), str)
            return _value(place) == "code" or (is_place and tells(node.value))
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return tells(node.elt)
        case ast.DictComp():
            return tells(node.key)
        case ast.Call():
            is_kept = _called(node) in ("set", "list", "sorted", "tuple", "len") and len(node.args) == 1
            return _called(node) in helpers or (is_kept and tells(node.args[0]))
        case ast.List() | ast.Set():
            return bool(node.elts) and all(map(tells, node.elts))
    return False


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _text(node: ast.expr) -> str:
    value = _value(node)
    return value if isinstance(value, str) else ""


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _comparisons(
    function: Function, helpers: set[str], names: set[str]
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (a code, what it is held against) of the assertions in a function."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare) and all(isinstance(op, HOLDING) for op in part.ops):
                sides = [part.left, *part.comparators]
                for left, right in pairwise(sides):
                    yield from _held(left, right, helpers, names)


def _held(
    left: ast.expr, right: ast.expr, helpers: set[str], names: set[str]
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what stands in the same place of both sides, where one of the two tells a code."""
    kinds = (ast.Tuple, ast.List)
    if isinstance(left, kinds) and isinstance(right, kinds) and len(left.elts) == len(right.elts):
        for one, other in zip(left.elts, right.elts, strict=True):
            yield from _held(one, other, helpers, names)
        return
    for one, other in ((left, right), (right, left)):
        if _tells(one, helpers, names):
            yield one, other


def _met_in_file(tree: ast.Module, helpers: set[str]) -> set[str]:
    tables = {name: value for node in tree.body for name, value in _assigned(node)}
    found: set[str] = set()
    for function in _outermost(tree):
        told = (_text(part) for part in ast.walk(function) if isinstance(part, ast.Constant))
        if not any(map(STANDIN_MAKES.search, told)):
            found |= _met_in(function, helpers, tables)
    return found


def _met_in(function: Function, helpers: set[str], tables: dict[str, ast.expr]) -> set[str]:
    names = _telling_names(function, helpers)
    values = {name: [value] for name, value in tables.items()} | _columns(function, tables)
    held = [other for _, other in _comparisons(function, helpers, names)]
    made: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and _tells(node.value, helpers, names):
            held.append(node.slice)
        elif isinstance(node, ast.Call):
            held += node.args[:1] if _called(node) == "fault" else []
            made += node.args[:1] if _called(node) in MAKERS else []
    return _texts(held, values) - _texts(made, values)


def _columns(function: Function, tables: dict[str, ast.expr]) -> dict[str, list[ast.expr]]:
    """Return the values of each parameter of a parametrized test."""
    columns: dict[str, list[ast.expr]] = {}
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or _called(call) != "parametrize" or len(call.args) < 2:
            continue
        heads, table = call.args[:2]
        names = [_text(head) for head in heads.elts] if isinstance(heads, ast.Tuple) else [_text(heads)]
        table = tables.get(table.id, table) if isinstance(table, ast.Name) else table
        for row in table.elts if isinstance(table, ast.List | ast.Tuple) else [table]:
            cells = row.args if isinstance(row, ast.Call) and _called(row) == "param" else None
            cells = cells or (row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row])
            for name, cell in zip(names, cells, strict=False):
                columns.setdefault(name, []).append(cell)
    return columns


def _texts(nodes: Iterable[ast.expr], values: dict[str, list[ast.expr]]) -> set[str]:
    """Return the texts of expressions; a name stands for its table or the column of its parameter."""
    found: set[str] = set()
    for part in (part for node in nodes for part in ast.walk(node)):
        if isinstance(part, ast.Constant):
            found.add(_text(part))
        elif isinstance(part, ast.Name):
            rest = {name: value for name, value in values.items() if name != part.id}
            found |= _texts(values.get(part.id, []), rest)
    return found
