"""Secrets planted in the environment, in argv, in data and in logs: no file of ours and no answer ever holds one.

Searched is every file that a test leaves: run folder, FINETUNE_HOME with plans, runs and jobs, exports and reports.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import tools
from agent.folder import RunFolder
from agent.processes import wait_until
from agent.render import text_of
from agent.roots import Roots
from tests.agent.calls import SLOW, TINY, Caller, Standin, codes, wait_for_step

NAMED = "planted0000value1111"  # a secret because the variable that holds it is named like one
SHAPED = "hf_PlantedPlantedPlanted2222"  # a secret because it looks like one
PASSWORD = "planted3333word"  # in a URL
SECRETS = (NAMED, SHAPED, PASSWORD)
PAGE = f"https://user:{PASSWORD}@example.org/x"


@pytest.fixture
def planted(rows: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return rows of which each names a token, in an environment that holds one."""
    monkeypatch.setenv("PLANTED_API_KEY", NAMED)
    monkeypatch.setenv("HF_TOKEN", NAMED)  # which children get
    lines = [{"prompt": f"{n}: my key is {SHAPED}", "completion": f"{n} {PAGE}"} for n in range(32)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows


def holders(folder: Path, *sources: Path) -> list[str]:
    """Return the files that hold a planted secret, or are named by one, besides those that the test wrote itself."""
    found = []
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            content = path.read_bytes() if path.is_file() and path not in sources else b""
            if any(secret.encode() in content or secret in path.name for secret in SECRETS):
                found.append(str(path.relative_to(folder)))
    return found


def clean(answer: dict[str, Any]) -> dict[str, Any]:
    assert not [secret for secret in SECRETS if secret in text_of(answer)], answer
    return answer


def test_the_search_finds_what_it_is_meant_to_find(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "log").write_bytes(b"\xff" + NAMED.encode())
    (tmp_path / f"{PASSWORD}.json").write_text("{}")
    (tmp_path / "rows").write_text(SHAPED)
    assert sorted(holders(tmp_path, tmp_path / "rows")) == ["deep/er/log", f"{PASSWORD}.json"]


def test_a_run_that_prints_secrets_leaves_none(standin: Standin, planted: Path, tmp_path: Path) -> None:
    standin.environ |= {"PLANTED_API_KEY": NAMED, "HF_TOKEN": NAMED}
    said = f"{NAMED} {SHAPED} {PAGE}"
    out = tmp_path / "out"
    for how in (f"print:{said}", f"print:{said},crash:{said}"):
        argv = ["run", *TINY, "--data", str(planted), "--out", str(out), "--seed", str(len(how))]
        clean(standin(*argv, how=how)[0])
        for look in ("status", "logs", "explain-error", "report"):
            clean(standin(look, str(out))[0])
        assert holders(tmp_path, planted) == []
        out = tmp_path / "other"
    assert "***" in (tmp_path / "out" / "logs" / "launch.log").read_text()  # it was said, and masked


def test_secrets_in_the_error_of_a_rank_and_in_the_log_of_a_killed_run_do_not_stay(
    standin: Standin, planted: Path, tmp_path: Path
) -> None:
    standin.environ |= {"PLANTED_API_KEY": NAMED, "HF_TOKEN": NAMED}
    out = tmp_path / "out"
    argv = ["run", *TINY, "--data", str(planted), "--out", str(out)]
    killed = standin.start(*argv, how=f"print:{NAMED} {PAGE},{SLOW}")
    wait_for_step(RunFolder(out), 1)
    killed.kill()
    killed.wait()
    assert holders(out)  # nobody was left to mask them
    clean(standin(*argv, how=f"refuse-with:{NAMED} {SHAPED} {PAGE}")[0])
    assert (out / "logs" / "attempt-1" / "launch.log").exists()
    assert (out / "heartbeat" / "rank0.error.json").exists()
    assert holders(tmp_path, planted) == []


def test_no_command_line_of_a_detached_run_holds_a_secret(
    standin: Standin, planted: Path, tmp_path: Path
) -> None:
    """SE-03; that of a run with real ranks is in test_two_ranks.py."""
    standin.environ |= {"PLANTED_API_KEY": NAMED, "HF_TOKEN": SHAPED}
    out = tmp_path / "out"
    standin("start", *TINY, "--data", str(planted), "--out", str(out), how=SLOW)
    wait_for_step(RunFolder(out), 1, 60)
    home = f"FINETUNE_HOME={standin.environ['FINETUNE_HOME']}".encode()
    lines = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if home in (place / "environ").read_bytes().split(b"\0"):
                lines.append((place / "cmdline").read_bytes())
    assert standin("stop", str(out))[1] == 0
    assert {part for line in lines for part in line.split(b"\0")} >= {b"--supervise", b"--train"}
    assert not [line for line in lines if any(secret.encode() in line for secret in SECRETS)]


@pytest.mark.parametrize(
    "argv",
    [
        ["explain-error", f"401 for {PAGE} with {SHAPED} and {NAMED}"],
        ["status", f"run-{SHAPED}"],
        ["plan", *TINY, "--data", f"{SHAPED}.jsonl"],
        ["plan", *TINY, "--data", PAGE],
        ["plan", *TINY, "--data", "ROWS", "--system-prompt", f"the key is {NAMED}"],
        ["plan", *TINY, "--data", "ROWS", "--system-prompt", f"the key is {SHAPED}"],
        ["plan", *TINY, "--data", "ROWS", f"--{SHAPED}", NAMED],
        ["plan", "--method", "grpo", *TINY[2:], "--data", "ROWS", "--vllm-url", PAGE],
        ["run", *TINY, "--data", "ROWS", "--lora-targets", SHAPED],
        [f"verb-{SHAPED}"],
    ],
    ids=lambda argv: argv[0][:8],
)
def test_secrets_in_argv_are_neither_stored_nor_repeated(
    argv: list[str],
    planted: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    clean(command(*[argument.replace("ROWS", str(planted)) for argument in argv])[0])
    assert holders(tmp_path, planted) == []


@pytest.mark.parametrize("setting", ["system_prompt", "lora_targets"])
def test_a_setting_that_looks_like_a_secret_is_refused_for_it_would_be_masked_in_the_plan(
    setting: str, planted: Path, home: Path, command: Callable[..., Any]
) -> None:
    flag = "--" + setting.replace("_", "-")
    answer, code = command("plan", *TINY, "--data", str(planted), flag, SHAPED)
    assert (code, codes(answer)[0]) == (2, "bad_value")
    assert answer["errors"][0]["evidence"]["setting"] == setting


@pytest.mark.slow
def test_jobs_of_tools_with_secrets_in_data_and_argv_leave_none(
    call_tool: Caller, roots: Roots, planted: Path, tmp_path: Path
) -> None:
    data = roots.first / "rows.jsonl"
    data.write_text(planted.read_text())
    chosen = {"method": "sft", "settings": {"model": "builtin:tiny", "data": ["rows.jsonl"], "device": "cpu"}}
    job = clean(call_tool("ft_check_data", chosen))["data"]["job_id"]
    assert wait_until(lambda: call_tool("ft_status", run=job)["status"] != "running", 120)
    done = clean(call_tool("ft_status", run=job))
    assert done["data"]["result"]["ledger"]["read"] == 32
    clean(tools.call("ft_generate", {"run": f"run-{SHAPED}", "prompt": [f"{NAMED} {PAGE}"]}, roots))
    assert holders(tmp_path, planted, data) == []
