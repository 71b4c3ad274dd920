"""list.txt has one more line than it had, at its end."""

from pathlib import Path


def test_the_line_stands_at_the_end_and_the_others_before_it():
    assert Path("list.txt").read_text().split("\n") == ["eggs", "bread", "milk", ""]
