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


def test_untouched_settings_stand_apart_and_advanced_ones_are_left_to_the_file() -> None:
    sources = {"a": "default", "b": "user", "c": "default", "d": "plan"}
    settings = {name: {"value": 1, "source": source} for name, source in sources.items()}
    plan = {"settings": settings, "identity": {}, "level": "quick", "prepared": None, "report": None}
    assert shown_plan(plan, {"a", "b", "d"}) == {
        "settings": {name: settings[name] for name in "bd"},
        "defaults": {"c": 1},
        "level": "quick",
    }


def test_the_account_of_the_rows_is_shown_in_short() -> None:
    files = [{"path": "/a", "sha256": "0" * 64, "rows": 2}]
    report = {"ledger": {"read": 2}, "preview": ["long"], "num_tokens": 9}
    shown = shown_plan({"settings": {}, "data": {"files": files}, "report": report}, set())
    assert shown["data"] == {"files": [{"path": "/a", "rows": 2}]}
    assert shown["report"] == {"ledger": {"read": 2}, "num_tokens": 9}
