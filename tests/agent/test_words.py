"""One line for a result, and what of a plan an answer shows; the line of a plan is in test_decisions.py."""

from typing import Any

from agent.words import result_line, shown_plan

RESULT: dict[str, Any] = {"steps": 4, "eval_before": None, "eval_after": None, "lift": None}


def test_a_result_is_told_by_what_it_has() -> None:
    assert result_line(RESULT) == "4 steps"
    before, after = {"loss": 2.0, "accuracy": None}, {"loss": 1.5, "accuracy": None}
    lift = {"of": "loss saved", "mean": 0.5, "low": 0.4, "high": 0.6}
    told = RESULT | {"eval_before": before, "eval_after": after, "lift": lift}
    assert result_line(told) == "4 steps, held-out loss 2 -> 1.5"


def test_rewards_and_the_lift_with_its_interval_are_told() -> None:
    told = RESULT | {
        "eval_before": {"loss": None, "accuracy": 0.16},
        "eval_after": {"loss": None, "accuracy": 0.4},
        "lift": {"of": "accuracy", "mean": 0.24, "low": 0.18, "high": 0.3},
    }
    expected = "4 steps, reward 0.2 -> 0.55, held-out accuracy 0.16 -> 0.4, lift +0.24 (+0.18 to +0.3)"
    assert result_line(told, {"first": 0.2, "last": 0.55}) == expected


def test_untouched_advanced_settings_are_left_to_the_file() -> None:
    sources = {"a": "default", "b": "user", "c": "default", "d": "plan"}
    settings = {name: {"value": 1, "source": source} for name, source in sources.items()}
    shown = shown_plan({"settings": settings, "identity": {}, "level": "quick"}, {"a", "b", "d"})
    assert shown == {"settings": {name: settings[name] for name in "bcd"}, "level": "quick"}
