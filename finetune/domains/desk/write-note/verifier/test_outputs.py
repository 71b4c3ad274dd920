"""note.txt holds the text that was asked for."""

from pathlib import Path


def test_the_note_holds_the_text():
    assert Path("note.txt").read_text().strip() == "hello desk"
