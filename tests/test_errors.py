"""Every error code is raised by the product and met by a test, and tells itself wherever its traceback lands."""

import ast
import traceback
from pathlib import Path

import pytest

from finetune.errors import EXIT_CODES, FinetuneError, Problems
from finetune.rank import describe
from tests.comparisons import met

ROOT = Path(__file__).parents[1]
# Where a code is named without being raised: the declaration and the reading of logs and metrics.
TALK = {"errors", "hints", "health", "explaining", "tracebacks"}


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
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "standin.py"]
    assert set(EXIT_CODES) - met(paths) == set()


COMPARED = """
TABLE = [(KeyError, "bad_task"), pytest.param(OSError, "bad_path")]

def problems(call):
    return [error.code for error in call.errors]

@fault("bad_domain", 3)
def a_domain(place):
    return place.planned("bad_export")

@pytest.mark.parametrize(("error", "code"), TABLE)
def test_a(error, code):
    described = describe(error)
    assert (described["code"], described["rank"]) == (code, "bad_adapter")
    assert "too_long" in problems(call)
    found = {item["code"]: item for item in answer["errors"]}
    assert found["bad_roles"]["status"] == "stopped"

def test_b():
    assert (code, answer["status"], answer["errors"][0]["code"]) == (0, "failed", "bad_row")
    assert raised.value.code == "file_missing"
"""
NOT_COMPARED = """
def test_c(standin):
    assert standin("run", how="pause:1,fail:bad_row")[0]["errors"][0]["code"] == "bad_row"

def test_d():
    print("no_rows")
    status = "offline"
    assert status == "offline"
    assert answer["status"] == "stopped"
    assert described(FinetuneError("usage", "x"))["code"] == "usage"
    assert error.code != "bug"
"""


def test_only_what_a_code_is_held_against_counts_as_met(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(COMPARED)
    (tmp_path / "test_y.py").write_text(NOT_COMPARED)
    assert met([tmp_path / "test_y.py"]) == set()
    expected = {"bad_task", "bad_path", "bad_domain", "too_long", "bad_roles", "bad_row", "file_missing"}
    assert met([tmp_path / "test_x.py", tmp_path / "test_y.py"]) == expected


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
