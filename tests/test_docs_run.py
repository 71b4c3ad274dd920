"""Every command of the pages, carried out as a reader would: in a folder of small files, beside a run of builtin:tiny.

A command that trains is planned instead. Of those that load a model one of each kind is carried out here, and all the
others in `make proof ROW=long-tests`.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.states import UNFINISHED
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.ledger import Rollout, RolloutBatch, RolloutFiles
from finetune.rollout.served import ServedEngine
from tests.agent.calls import checked
from tests.pages import commands, differences, filled_in

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docs")]
CHECK = "finetune check-data --method sft --model builtin:smollm2-135m --data rows.jsonl"
# Of the verbs that load a model or read all rows, these are carried out in `make test`.
CARRIED_OUT = (
    f"{CHECK} --detach",
    "finetune tasks check builtin:desk/copy-file",
    "finetune evaluate RUN",
    "finetune export RUN --kind merged --to merged",
    'finetune generate RUN --prompt "What is 17 + 25?" "What is 3 + 4?" --max-new-tokens 16',
)
LONG = ("check-data", "prepare", "evaluate", "export", "generate", "tasks")
ONLY_STARTED = {"--confirm": 0, "--new": 0, "--detach": 0, "--dry-run": 0, "--yes-under": 1}
TINY = "--method sft --model builtin:tiny --data rows.jsonl --device cpu --out runs/a --max-steps 6".split()
TINY += "--checkpoint-every 2 --global-batch-size 4 --threads 1 --eval-fraction 0.2 --dtype fp32".split()
LOG = """step 11 loss 2.31
Traceback (most recent call last):
  File "/x/train.py", line 80, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB
"""


def long_with_settings() -> list[str]:
    """Return the commands too long for `make test` of which a plan tells whether data and settings fit."""
    return [
        command
        for command in commands()
        if command.split()[1] in LONG
        and command not in CARRIED_OUT
        and "--method" in command
        and "--model merged" not in command
    ]


def runnable() -> list[Any]:
    """Return the commands to carry out; those too long for `make test` are marked."""
    found = []
    for command in commands():
        argv = command.split()
        if argv[0] == "make" or argv[1] == "--help":
            continue
        is_long = "full" in argv or argv[1:] == ["doctor"] or (argv[1] in LONG and command not in CARRIED_OUT)
        found.append(pytest.param(command, marks=[pytest.mark.proof] if is_long else [], id=command))
    return found


class Steady:
    """An engine that always says the same."""

    def sample(self, calls: Any, sampling: Sampling) -> list[list[Completion | Fault]]:
        return [[Completion([7, 8], [-1.0, -1.0], True)] for _ in calls]

    def close(self) -> None:
        """Nothing to leave behind."""


class Desk:
    """A folder with what the pages name, a finished run in runs/a, and the values of the placeholders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values = {"RUN": "runs/a"}
        self.first: dict[str, dict[str, Any]] = {}  # answers that a second call would not give again

    def write_files(self) -> None:
        chats = [[f"What is {n} + 1?", f"It is {n + 1}."] for n in range(40)]
        turns = [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
            for ask, say in chats
        ]
        self._write("rows.jsonl", turns[:30])
        self._write("more.jsonl", turns[30:36])
        self._write("held_out.jsonl", turns[36:])
        self._write("questions.jsonl", [{"question": ask, "reply": say} for ask, say in chats])
        self._write("tasks.jsonl", [{"prompt": ask, "answer": n + 1} for n, (ask, _) in enumerate(chats)])
        (self.folder / "prompts.txt").write_text("What is 2 + 1?\nWhat is 3 + 1?\n")
        (self.folder / "train.log").write_text(LOG)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(self, *argv: str, folder: Path | None = None) -> dict[str, Any]:
        """Carry a command out in this process and return its answer."""
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.chdir(folder or self.folder), contextlib.redirect_stdout(out):
            code = cli.main([*argv, "--json"])
        out.seek(0)
        answer = checked(out.read(), code)
        assert (code, answer["errors"]) == (0, []), argv
        return answer

    def train(self) -> None:
        """Plan a run, start that plan detached, and wait until it is done, as the pages say."""
        self.values["PLAN_ID"] = self.call("plan", *TINY)["data"]["plan_id"]
        started = self.call("start", "--plan", self.values["PLAN_ID"])
        assert started["status"] in UNFINISHED
        self.first["finetune start --plan PLAN_ID"] = started
        ended = self.call("status", "runs/a", "--wait", "300")
        assert ended["status"] == "succeeded"
        self._write_rollouts()

    def _write_rollouts(self) -> None:
        """Put a batch of one completion into the run, with the engine's account of it: what a grpo run leaves."""
        engine = ServedEngine(Steady())
        ((answer,),) = engine.sample([Call([5, 6], 1)], Sampling(8, []))
        assert isinstance(answer, Completion)
        rollout = Rollout(
            "1-0-0", 0, 0, 0, "rows:1", 1, "base", [5, 6], answer.ids, answer.logprobs, reward=1.0
        )
        files = RolloutFiles(self.folder / "runs/a/rollouts")
        files.write(RolloutBatch(1, 0, "made", [rollout], served=engine.records))

    def provide(self, words: list[str]) -> None:
        """Make what a command needs of the commands before it on its page."""
        if "JOB_ID" in words:
            if "JOB_ID" not in self.values:
                self.values["JOB_ID"] = self.call(*f"{CHECK} --detach".split()[1:])["data"]["job_id"]
            self.call("status", self.values["JOB_ID"], "--wait", "300")
        if "merged" in words[1:] and "--model" in words and not (self.folder / "merged").exists():
            self.call("export", "runs/a", "--to", "merged")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_HOME", str(folder / "state"))
        patch.setenv("HOME", str(folder / "home"))
        place = Desk(folder)
        place.write_files()
        place.call("verifier-skeleton", "my_verifier.py")
        place.train()
        yield place


@pytest.fixture(scope="module")
def unused(desk: Desk) -> Path:
    """Return a folder with the same files and no run: where a command that would train is planned."""
    folder = desk.folder / "unused"
    folder.mkdir()
    for path in desk.folder.glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def planned(argv: list[str]) -> list[str]:
    """Return a command that would train as one that only plans, with the flags that a plan takes."""
    kept, skip = ["plan"], 0
    for word in argv[1:]:
        if word in ONLY_STARTED:
            skip = ONLY_STARTED[word]
        elif skip:
            skip -= 1
        else:
            kept.append(word)
    return kept


def test_a_command_that_would_train_is_only_planned() -> None:
    argv = "start --method sft --yes-under hours=1 --out a --confirm".split()
    assert planned(argv) == "plan --method sft --out a".split()


def test_each_command_to_carry_out_stands_on_a_page() -> None:
    assert set(CARRIED_OUT) <= set(commands())


@pytest.mark.parametrize("command", runnable())
def test_commands_run_as_written(command: str, desk: Desk, unused: Path) -> None:
    words = command.split()
    desk.provide(words)
    _, *argv = filled_in(command, desk.values)
    trains = argv[0] in ("run", "start") and "--plan" not in argv
    if "--method" in argv and "--device" not in argv:
        argv += ["--device", "cpu"]
    if trains:
        argv = planned(argv)
    answer = desk.call(*argv, folder=unused if trains or argv[0] == "plan" else None)
    if "job_id" in answer["data"]:
        desk.values["JOB_ID"] = answer["data"]["job_id"]
    for shown in commands()[command]:
        assert differences(shown.answer, desk.first.get(command, answer)) == [], shown.page


@pytest.mark.parametrize("command", long_with_settings())
def test_long_commands_can_be_planned(command: str, desk: Desk, unused: Path) -> None:
    _, *argv = filled_in(command, desk.values)
    assert desk.call(*planned(argv), "--device", "cpu", folder=unused)["status"] == "planned"
