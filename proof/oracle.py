"""Conversations of an oracle, to learn from: the real agent program works in a real box, and a script answers it.

A row is what the program had sent with its last request, tools included, and the last answer; more rows are the same
conversations about other words.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.boxes.bubblewrap import open_box
from finetune.data.chat import ChatFormat
from finetune.domains.tasks import Task, load_tasks, prepare_workspace
from finetune.model.builtin import load_tokenizer
from finetune.model.source import resolve_source
from finetune.rollout.bridge import Bridge, BridgeSettings, Session
from finetune.rollout.calls import ModelCall
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.harness import HarnessSettings, open_harness
from finetune.rollout.wire import ChatRequest

EASY = ("append-line", "copy-file", "write-note")
CONTEXT, NEW_TOKENS = 4096, 96
# What each task is about -> what else it may be about.
_WORDS = {
    "append-line": {"milk": "tea rice soap eggs salt jam corn beans", "list": "shop todo buy items food"},
    "copy-file": {"report": "plan draft notes story letter", "backup": "copy saved second spare old"},
    "write-note": {
        "hello desk": "good day,see you,well done,red lamp,no rain",
        "note": "memo text word card",
    },
}


class OracleEngine:
    """Answers the first call with the oracle's command and every later one with the last word."""

    def __init__(self, chat: ChatFormat, command: str, harness: str) -> None:
        about = {"description": "Does the task"} if harness == "opencode" else {}
        submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        self._chat = chat
        self._first = _tool_call({"command": command} | about)
        self._last = _tool_call({"command": submit}) if harness == "mini" else "Done."
        self._is_begun = False

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        return [[self._one()] for _ in calls]

    def _one(self) -> Completion:
        text = self._last if self._is_begun else self._first
        self._is_begun = True
        ids = [*self._chat.tokens.ids([text])[text], self._chat.stop_token_ids[0]]
        return Completion(ids, [-0.1] * len(ids), True)

    def close(self) -> None:
        """Nothing to leave behind."""


class _Listening(Bridge):
    """A bridge that keeps the last request of the policy."""

    last: ChatRequest | None = None

    async def _begun(self, session: Session, request: ChatRequest) -> ModelCall:
        call = await super()._begun(session, request)
        if call.record.purpose == "policy":
            self.last = request
        return call


def _tool_call(arguments: dict[str, str]) -> str:
    body = json.dumps({"name": "bash", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def write_rows(file: Path, model: str, harness: str, program: Path | None, num_rows: int) -> None:
    """Write conversations about the easy tasks of the desk in other words, `num_rows` of each."""
    chat = ChatFormat(load_tokenizer(resolve_source(model)), tools=True)
    draw = random.Random(0)
    rows = []
    for task in (load_tasks(f"builtin:desk/{name}")[0] for name in EASY):
        recorded = json.dumps(conversation(task, chat, harness, program))
        rows += [_reworded(recorded, task.name, draw) for _ in range(num_rows)]
    draw.shuffle(rows)
    file.write_text("".join(row + "\n" for row in rows))


def conversation(task: Task, chat: ChatFormat, harness: str, program: Path | None) -> dict[str, Any]:
    """Return messages and tools of the oracle's work on a task with this agent program."""
    command = (task.folder / "oracle" / "solve.sh").read_text().strip()
    engine = OracleEngine(chat, command, harness)
    opened = open_harness(harness, HarnessSettings(CONTEXT, NEW_TOKENS, max_steps=4, program=program))
    settings = BridgeSettings(CONTEXT, NEW_TOKENS)
    box = open_box()
    with tempfile.TemporaryDirectory(prefix="finetune-oracle-") as folder:
        workspace = Path(folder)
        workspace.chmod(0o777)
        prepare_workspace(task, workspace, box)
        with _Listening(engine, chat, engine, settings) as bridge:
            session = bridge.open(task.name, 0, helper_prompts=opened.helper_prompts)
            outcome = opened.run(task.prompt, workspace, session, box, task.limits)
            records = [one for one in bridge.close(session) if one.status == "used"]
            asked = bridge.last
    if outcome.status != "finished" or asked is None or not records:
        raise RuntimeError(f"{harness} on {task.name}: {outcome.status}: {outcome.log[-500:]}")
    return {"messages": [*asked.messages, records[-1].answer], "tools": asked.tools}


def _reworded(row: str, task: str, draw: random.Random) -> str:
    for word, others in _WORDS[task].items():
        row = row.replace(word, draw.choice([word, *others.split("," if "," in others else " ")]))
    return row
