"""The program that was written says the right words of texts that it has not seen."""

import os
from pathlib import Path

PROGRAMS = Path(os.environ["PROGRAMS"])


def printed(name):
    assert (PROGRAMS / name / "exit_code").read_text() == "0"
    return (PROGRAMS / name / "stdout").read_text().split("\n")


def test_words_are_counted_in_either_case():
    assert printed("poem") == ["sea 4", "the 3", "wind 3", ""]


def test_ties_go_by_the_alphabet():
    assert printed("ties") == ["alpha 2", "beta 2", "delta 2", ""]


def test_a_short_text_gives_fewer_lines():
    assert printed("short") == ["echo 2", ""]
