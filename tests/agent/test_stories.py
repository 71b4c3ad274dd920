"""The whole way through the tools by a client that is killed in the middle: over MCP, and by OpenAI tool calls (story.py)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.folder import check_against_schema
from agent.processes import wait_until
from agent.render import MOST_CHARACTERS

STORY = str(Path(__file__).with_name("story.py"))
WAYS = ("mcp", "openai")


def told(output: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, output.splitlines()) if "tool" in line]


class Story:
    """One client after another, over the same folder."""

    def __init__(self, folder: Path, way: str, model: str, steps: int) -> None:
        self.environ = os.environ | {"FINETUNE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        self.folder, self.rest = folder / "work", [str(folder / "work"), model, str(steps)]
        self.way = way
        self.folder.mkdir()
        turns = [(f"Say {n}.", f"Number {n}!") for n in range(24)]
        rows = [{"prompt": ask, "completion": say} for ask, say in turns]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def open(self, part: str) -> subprocess.Popen[str]:
        argv = [sys.executable, STORY, self.way, part, *self.rest]
        return subprocess.Popen(
            argv,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def begin_and_kill(self) -> list[dict[str, Any]]:
        """Run the first client up to the start of the run, kill it and its server, and return its calls."""
        client = self.open("begin")
        assert client.stdout is not None
        lines = []
        for line in client.stdout:
            lines.append(line)
            if "started" in json.loads(line):
                break
        else:
            raise AssertionError(client.communicate()[1][-3000:])
        servers = children_of(client.pid)
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        assert bool(servers) == (self.way == "mcp")
        for server in servers:  # its stdin has closed with the client
            assert wait_until(lambda server=server: not is_alive(server), 20)
        return told("".join(lines))

    def finish(self) -> list[dict[str, Any]]:
        client = self.open("finish")
        output, errors = client.communicate(timeout=900)
        assert client.returncode == 0, output[-3000:] + errors[-3000:]
        return told(output)


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in threads for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def whole_story(story: Story, most_s: float) -> None:
    calls = story.begin_and_kill() + story.finish()
    used = list(dict.fromkeys(call["tool"] for call in calls))
    assert used == [
        "ft_doctor",
        "ft_check_data",
        "ft_status",
        "ft_plan",
        "ft_start",
        "ft_list_runs",
        "ft_evaluate",
        "ft_export",
    ]
    for call in calls:
        check_against_schema("answer", call["answer"])
        assert not call["is_error"]
        assert len(json.dumps(call["answer"], ensure_ascii=False)) <= MOST_CHARACTERS
        if call["tool"] != "ft_status":  # which waits as long as it is told to
            assert call["seconds"] < most_s, (call["tool"], call["seconds"])
    run = json.loads((story.folder / "run" / "run.json").read_text())
    assert run["status"] == "succeeded"
    assert len(run["attempts"]) == 1  # it was never interrupted
    assert (story.folder / "merged" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["mcp", pytest.param("openai", marks=pytest.mark.proof)]
)  # one of them always
def test_a_client_plans_and_starts_is_killed_and_another_one_evaluates_and_exports(
    way: str, tmp_path: Path
) -> None:
    whole_story(Story(tmp_path, way, "builtin:tiny", 6), most_s=60)


@pytest.mark.proof
@pytest.mark.parametrize("way", WAYS)
def test_the_same_story_with_a_real_model_and_no_call_over_5_seconds(way: str, tmp_path: Path) -> None:
    whole_story(Story(tmp_path, way, "builtin:smollm2-135m", 8), most_s=5)
