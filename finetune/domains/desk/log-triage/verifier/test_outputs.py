"""answer.json names the service with the most errors."""

import json
from pathlib import Path


def answer():
    return json.loads(Path("answer.json").read_text())


def test_the_service_is_found():
    assert answer()["service"] == "auth"


def test_its_errors_are_counted():
    assert answer()["errors"] == 12


def test_its_first_error_is_found():
    assert answer()["first"] == "2026-05-04T08:03:37"
