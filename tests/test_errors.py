"""Every error code is raised by the product and met by a test, and tells itself wherever its traceback lands."""

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.errors import EXIT_CODES, FinetuneError, Problems
from finetune.rank import describe

ROOT = Path(__file__).parents[1]
# Where a code is named without being raised: the declaration and the reading of logs and metrics.
TALK = {"errors", "hints", "health", "explaining", "tracebacks"}
# Calls whose texts say nothing of what was raised.
MAKERS = {"FinetuneError", "boundary", "hint", "explained", "command"}


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a piece of code, but for those that only make an error or ask what one means."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in MAKERS:
            return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split()
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def expected(path: Path) -> set[str]:
    """Return the texts that a test file holds results against: in assertions, tables of cases and registered faults."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert | ast.Assign) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("fault", "pytest.mark.parametrize")
        ):
            found.update(texts(node))
    return found


def test_every_code_is_raised_by_the_product() -> None:
    named: set[str] = set()
    for top in ("finetune", "agent"):
        for path in (ROOT / top).rglob("*.py"):
            if path.stem not in TALK:
                tree = ast.parse(path.read_text())
                named |= {
                    node.value
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Constant) and node.value in EXIT_CODES
                }
    assert set(EXIT_CODES) - named == set()


def test_every_code_is_met_by_a_test() -> None:
    met: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in (
            "standin.py",
            "test_hints.py",
            "test_render.py",
            "test_health.py",
            "test_errors.py",
        ):
            met |= expected(path)
    met |= {code for _, code in KINDS}
    assert set(EXIT_CODES) - met == set()


def test_a_code_that_is_only_made_or_explained_counts_as_met_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        'assert FinetuneError("bad_row", "x")\nassert error.code == "too_long"\nprint("no_rows")\n'
    )
    assert expected(path) == {"too_long"}


KINDS = [
    (MemoryError("x"), "out_of_memory"),
    (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes"),
        "out_of_memory",
    ),
    (OSError(28, "No space left on device"), "disk_full"),
    (ModuleNotFoundError("No module named 'x'"), "missing_package"),
    (KeyError("x"), "training_failed"),
]


@pytest.mark.parametrize(("error", "code"), KINDS)
def test_a_rank_types_what_it_failed_with(error: Exception, code: str) -> None:
    described = describe(error, 3)
    assert (described["code"], described["rank"]) == (code, 3)


def test_a_traceback_tells_the_code() -> None:
    one = FinetuneError("bad_row", "it is bad")
    for error in (one, Problems([one, FinetuneError("too_long", "x")])):
        assert traceback.format_exception(error)[-1].endswith("error code: bad_row\n")
        assert str(error).startswith("it is bad")
