"""Limits: each stops a run with a save and says which it was; the question before a run that costs more than agreed to."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from agent.attempt import full_disk_passed_over
from agent.budgets import GB, Watch, expected_costs, left, to_confirm
from agent.folder import RunFolder
from finetune.errors import FinetuneError
from tests.agent.calls import GRPO, Standin, document

SLOW = "steps:200,pause:0.1"
SPENT = {"seconds": 0.0, "generated_tokens": 0, "disk_bytes": 0}


def a_plan(passes: int = 1, **limits: float) -> dict[str, Any]:
    settings = {name: {"value": value, "source": "user"} for name, value in limits.items()}
    settings["passes"] = {"value": passes, "source": "default"}
    return {"settings": settings, "model": {"trained_parameters": 0}, "estimates": {}}


def over(watch: Watch) -> str | None:
    error = watch.over()
    return None if error is None else f"{error.code} {error.evidence.get('setting')}"


def test_a_run_stops_so_that_the_batch_under_way_still_fits(tmp_path: Path) -> None:
    watch = Watch(RunFolder(tmp_path), a_plan(max_generated_tokens=450), SPENT, [])
    for step, expected in ((1, None), (2, None), (3, "over_budget max_generated_tokens")):
        watch.step({"step": step, "sampled_tokens": 100})
        assert over(watch) == expected  # after the third: 300, 100 under way, and another 100 would be 500
    assert watch.spent["generated_tokens"] == 300


def test_tokens_are_counted_once_for_each_batch_and_each_line(tmp_path: Path) -> None:
    old = [{"step": step, "sampled_tokens": 100, "loss": 0.5} for step in (1, 2)]
    before = {"seconds": 5.0, "generated_tokens": 100, "disk_bytes": 0}
    watch = Watch(RunFolder(tmp_path), a_plan(passes=2), before, old)
    for line in (*old, {"step": 3, "sampled_tokens": 70}, {"step": 4, "sampled_tokens": 70}):
        watch.step(line)  # a resumed run shows the kept lines again; both passes tell of the same batch
    watch.step({"step": 5, "sampled_tokens": 30, "replayed": True})  # nothing was sampled
    watch.event({"kind": "evaluated", "num_tokens": 9})
    watch.event({"kind": "sync"})
    assert watch.spent["generated_tokens"] == 100 + 70 + 9
    again = Watch(RunFolder(tmp_path), a_plan(passes=1), SPENT, old)
    again.step({"step": 2, "sampled_tokens": 100, "loss": 0.6})  # made again after a resume: another line
    assert again.spent["generated_tokens"] == 100


def test_a_resumed_run_is_refused_only_where_its_next_batch_does_not_fit(tmp_path: Path) -> None:
    before = {"seconds": 0.0, "generated_tokens": 400, "disk_bytes": 0}
    old = [{"step": 4, "sampled_tokens": 100}]
    assert over(Watch(RunFolder(tmp_path), a_plan(max_generated_tokens=500), before, old)) is None
    assert over(Watch(RunFolder(tmp_path), a_plan(max_generated_tokens=499), before, old)) is not None


def test_a_state_that_a_full_disk_does_not_take_ends_no_training() -> None:
    with full_disk_passed_over():
        raise OSError(errno.ENOSPC, "no space")
    with pytest.raises(PermissionError), full_disk_passed_over():
        raise PermissionError(errno.EACCES, "not ours")


def test_disk_and_hours_are_limits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.budgets.free_disk", lambda path: 100 * GB)
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "checkpoints/step-1/manifest.json").write_bytes(bytes(3_000_000))
    (tmp_path / "log").write_bytes(bytes(1_000_000))
    folder = RunFolder(tmp_path)
    assert over(Watch(folder, a_plan(max_disk_gb=0.0071), SPENT, [])) is None  # 4 MB, and 3 more
    assert over(Watch(folder, a_plan(max_disk_gb=0.0069), SPENT, [])) == "over_budget max_disk_gb"
    used = SPENT | {"seconds": 3600.0}
    assert over(Watch(folder, a_plan(max_hours=1), used, [])) == "over_budget max_hours"
    assert over(Watch(folder, a_plan(max_hours=1.1), used, [])) is None
    assert left(a_plan(max_hours=1.5, max_disk_gb=1), used | {"disk_bytes": GB // 4}) == {
        "hours_left": 0.5,
        "disk_gb_left": 0.75,
    }


def test_a_full_disk_and_a_lack_of_memory_are_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10 * GB
    monkeypatch.setattr("agent.budgets.free_disk", lambda path: free)
    monkeypatch.setattr("agent.budgets.memory", lambda: (100 * GB, 2 * GB))
    plan = a_plan() | {"model": {"trained_parameters": 100_000_000}}  # 1.2 GB a checkpoint
    watch = Watch(RunFolder(tmp_path), plan, SPENT, [])
    assert [item["code"] for item in watch.warnings] == ["low_memory"]
    free = 4 * GB
    watch = Watch(RunFolder(tmp_path), plan, SPENT, [])
    assert [item["code"] for item in watch.warnings] == ["low_disk", "low_memory"]
    assert watch.over() is None
    free = 2 * GB  # one checkpoint fits, two do not
    error = Watch(RunFolder(tmp_path), plan, SPENT, []).over()
    assert error is not None
    assert (error.code, error.exit_code, error.evidence["free_bytes"]) == ("disk_nearly_full", 10, 2 * GB)


@pytest.mark.parametrize(
    ("limit", "how", "code"),
    [
        (["--max-hours", "0.0005"], "", "over_budget"),  # 1.8 s
        (["--max-disk-gb", "0.02"], ",bytes:1000000", "over_budget"),
        (["--max-generated-tokens", "650"], ",tokens:100", "over_budget"),
        ([], ",free-disk:1000", "disk_nearly_full"),
    ],
    ids=["hours", "disk", "tokens", "full disk"],
)
def test_each_limit_stops_with_a_save_and_is_named(
    standin: Standin, rows: Path, folder: RunFolder, limit: list[str], how: str, code: str
) -> None:
    wanted = [*GRPO, "--engine", "local", "--data", str(rows), "--out", str(folder.path), *limit]
    answer, exit_code = standin("run", *wanted, how=SLOW + how)
    error = answer["errors"][0]
    assert (exit_code, answer["status"], error["code"]) == (10, "stopped", code)
    assert Path(error["evidence"]["checkpoint"]).is_dir()
    assert f"step-{error['evidence']['step']}" in error["evidence"]["checkpoint"]
    if limit:
        assert error["evidence"]["setting"] == limit[0].removeprefix("--").replace("-", "_")
    run, state = document(folder.manifest, "run"), document(folder.state, "state")
    assert (run["status"], run["exit_code"], run["error"]["code"]) == ("stopped", 10, code)
    assert (state["state"], state["hint_id"]) == ("stopped", code)
    if "tokens" in how:
        tokens = [json.loads(line)["sampled_tokens"] for line in folder.metrics.read_text().splitlines()]
        assert 400 <= sum(tokens) <= 650 + 100  # the watcher looks ten times a second, a step takes as long
    again, exit_code = standin("resume", str(folder.path), how=SLOW + how)
    assert (exit_code, again["errors"][0]["code"]) == (10, code)
    assert len(document(folder.manifest, "run")["attempts"]) == 1  # it was not even begun
    if code == "over_budget":
        assert again["next_actions"][0]["argv"][-2] == limit[0]


def test_a_training_that_does_not_stop_at_its_limit_is_killed(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("run", *flags, "--max-hours", "0.0001", how=f"{SLOW},deaf,limit-grace:0.5")
    assert (code, answer["errors"][0]["code"], answer["errors"][0]["evidence"]["killed"]) == (
        10,
        "over_budget",
        True,
    )


def test_a_higher_limit_goes_on_and_what_is_left_is_shown(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    assert standin("run", *flags, "--max-hours", "0.0003", how="steps:40,pause:0.1")[1] == 10
    spent = document(folder.state, "state")["spent"]["seconds"]
    assert spent >= 1
    answer, code = standin("resume", str(folder.path), "--max-hours", "2", how="steps:40")
    assert (code, answer["status"]) == (0, "succeeded")
    seen, _ = standin("status", str(folder.path))
    assert seen["data"]["budget"]["hours_left"] == pytest.approx(2, abs=0.05)
    assert document(folder.state, "state")["spent"]["seconds"] >= spent


def test_low_memory_shows_in_the_status_and_names_a_kill(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("run", *flags, how="pause:1.5,die,free-memory:1000")
    assert (code, answer["errors"][0]["code"]) == (8, "out_of_memory")
    events = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["kind"] == "warning"] == ["low_memory"]


def test_what_costs_more_than_agreed_to_waits_for_a_confirmation(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("start", *flags, "--yes-under", "disk_gb=0.0000001")
    error = answer["errors"][0]
    assert (code, error["code"], error["evidence"]["flag"]) == (6, "needs_confirmation", "--confirm")
    assert error["evidence"]["expected"]["disk_gb"] > 0
    assert not folder.path.exists()
    assert standin("run", *flags, FINETUNE_YES_UNDER="disk_gb=0.0000001")[1] == 6
    confirm = answer["next_actions"][0]["argv"][1:]
    assert confirm == ["start", "--plan", answer["data"]["plan_id"], "--confirm"]
    assert standin(*confirm, how="fail:non_finite")[1] == 0
    assert standin("status", str(folder.path), "--wait", "60")[0]["status"] == "failed"
    # What was agreed to when it began is not asked again.
    assert standin("run", *flags, "--yes-under", "disk_gb=0.0000001")[0]["status"] == "succeeded"


def test_what_the_plan_cannot_tell_counts_as_more() -> None:
    plan = a_plan() | {"estimates": {"hours": None, "disk_bytes": 2 * GB}, "parallel": {"devices": []}}
    assert expected_costs(plan) == {"hours": None, "gpu_hours": 0.0, "disk_gb": 2.0, "generated_tokens": 0}
    assert to_confirm(plan, "disk_gb=2,gpu_hours=0,generated_tokens=0", {}) is None
    assert to_confirm(plan, None, {}) is None
    assert to_confirm(plan, None, {"FINETUNE_YES_UNDER": "disk_gb=1.9"}) is not None
    error = to_confirm(plan, "hours=100", {"FINETUNE_YES_UNDER": "disk_gb=1.9"})
    assert error is not None
    assert "unknown hours (agreed to: 100)" in error.message


@pytest.mark.parametrize(
    "text", ["hours", "hours=", "hours=x", "hours=-1", "days=1", "hours=1,hours=2", "hours=nan"]
)
def test_a_limit_that_is_not_understood_is_refused(text: str) -> None:
    plan = a_plan() | {"estimates": {}, "parallel": {"devices": []}}
    with pytest.raises(FinetuneError) as caught:
        to_confirm(plan, text, {})
    assert (caught.value.code, caught.value.evidence["setting"]) == ("bad_value", "yes_under")


def test_a_limit_below_one_checkpoint_is_refused_before_anything_is_written(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("start", *flags, "--max-disk-gb", "0.000001")
    assert (code, answer["errors"][0]["code"]) == (2, "settings_conflict")
    assert not folder.path.exists()
