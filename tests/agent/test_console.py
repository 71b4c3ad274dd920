"""Live progress on a terminal and elsewhere."""

import io
from typing import Any

import pytest

from agent.console import Bar, Lines, duration, figures, open_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "num_steps": 100,
        "loss": 2.0,
        "tokens_per_s": 120.4,
        "step_s": 1.5,
        "peak_memory_bytes": 3 << 30,
    } | values


def test_the_stream_decides_what_is_drawn() -> None:
    assert isinstance(open_display(io.StringIO()), Lines)
    display = open_display(Terminal())
    assert isinstance(display, Bar)
    display.close()


def test_plain_lines_come_first_last_and_now_and_then() -> None:
    stream = io.StringIO()
    display = Lines(stream)
    for step in (1, 2, 3, 100):
        display.step(line(step))
    assert stream.getvalue().splitlines() == [
        "step 1/100  loss 2.0000  120 tok/s  3.0 GiB  ETA 2m28s",
        "step 100/100  loss 2.0000  120 tok/s  3.0 GiB  ETA 0m00s",
    ]


def test_the_bar_shows_the_figures_and_takes_text_as_it_is() -> None:
    stream = Terminal()
    display = Bar(stream)
    display.note("folder [bold]x[/bold]")
    display.step(line(40, eval_loss=1.25))
    display.close()
    text = stream.getvalue()
    assert "folder [bold]x[/bold]" in text
    assert "40/100" in text
    assert "eval 1.2500" in text


def test_a_step_without_figures_shows_none() -> None:
    assert figures({"step": 1, "loss": None}) == ""


def test_a_step_on_rollouts_begins_with_the_reward() -> None:
    figured = line(1, loss=0.0, reward_mean=0.25, truncated_share=0.125, eval_accuracy=0.5)
    assert figures(figured) == "reward 0.250  held-out 0.500  cut 12%  loss 0.0000  120 tok/s  3.0 GiB"
    assert figures({"reward_mean": 0.0, "truncated_share": 0.0}) == "reward 0.000"


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (59.9, "0m59s"), (61, "1m01s"), (7322, "2h02m")])
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
