"""Run folders written by hand for tests of reports, and a headless Chromium to open pages with."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder, check_against_schema

# Text as a hostile row, model or log would hold it.
HOSTILE = (
    "</script><script>document.documentElement.dataset.hacked = 1</script><img src=x onerror=alert(1)>&amp;"
)
UNSEEN = "a\x1b[31m\u202edrow\u2066\x07\ud800\u200f"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Tokens of the hand-written rollouts; 4 and 5 are the two bytes of one character.
TOKENS = {
    "1": "<|user|>",
    "2": "What is 1+1?",
    "3": " the",
    "4": [195],
    "5": [169],
    "6": " answer",
    "7": "\n2",
    "8": "</script>",
}
NEVER = {"pid": 1, "pid_start": 1, "boot_id": "0"}  # a process that is not there


def manifest(folder: Path, **changes: Any) -> dict[str, Any]:
    value = {
        "schema_version": "1",
        "run_id": "grpo-20260101-000000-aaaaaaaa",
        "plan_id": "p1",
        "method": "grpo",
        "status": "succeeded",
        "created": 1767225600.0,
        "started": 1767225600.0,
        "ended": 1767229200.0,
        "duration_s": 3600.0,
        "host": "here",
        "pid": 1,
        "argv": ["run"],
        "cmd_replay": "cd / && finetune run --method grpo",
        "ok_to_replay": True,
        "source": {"commit": "0123456789abcdef", "dirty": False},
        "packages": {"torch": "2.13.0", "peft": "0.21.2"},
        "settings": {
            "seed": {"value": 0, "source": "default"},
            "learning_rate": {"value": 0.0001, "source": "user"},
            "micro_batch_tokens": {"value": 1024, "source": "plan"},
            "beta": {"value": 0.0, "source": "default"},
        },
        "model": {"id": "builtin:tiny", "parameters": 1234567, "sha256": "m" * 64},
        "data": {
            "files": [{"path": "/d/rows.jsonl", "sha256": "d" * 64, "bytes": 2048, "rows": 12, "weight": 1.0}],
            "eval_files": [],
            "ledger": {
                "read": 12,
                "trained": 7,
                "held_out": 3,
                "dropped": {"too_long": ["rows.jsonl:4", "rows.jsonl:9"]},
                "truncated": {"answer": ["rows.jsonl:5"]},
                "notes": {"duplicates": 1},
            },
        },
        "parallel": {"kind": "ddp", "num_gpus": 2, "device": "cpu"},
        "resumed_from": 2,
        "outputs": [{"kind": "adapter", "path": str(folder / "adapter" / "a.safetensors"), "sha256": "c" * 64}],
        "result": {
            "steps": 4,
            "train_loss": 0.5,
            "eval_before": {"loss": None, "accuracy": 0.25, "num_rows": 4, "sampled_accuracy": 0.2},
            "eval_after": {"loss": None, "accuracy": 0.75, "num_rows": 4, "sampled_accuracy": 0.6},
            "lift": {
                "of": "accuracy", "mean": 0.5, "low": 0.125, "high": 0.875,
                "wins": 2, "ties": 2, "losses": 0, "num_pairs": 4, "num_excluded": 0,
            },
        },
        "facts": {"world_size": 2},
        "peak_memory_bytes_per_rank": [3 << 30, 2 << 30],
        "error": None,
        "exit_code": 0,
        "attempts": [attempt(1767225600.0, 1767227400.0, "stopped", None), attempt(1767227400.0, 1767229200.0, "succeeded", 2)],
        "warnings": [{"hint_id": "few_steps", "text": "the run takes 4 optimizer steps"}],
    } | changes  # fmt: skip
    check_against_schema("run", value)
    return value


def attempt(started: float, ended: float, status: str, resumed_from: int | None) -> dict[str, Any]:
    return {
        "started": started,
        "ended": ended,
        "host": "here",
        "pid": 1,
        "status": status,
        "exit_code": 0,
        "resumed_from": resumed_from,
        "num_gpus": 1 if resumed_from is None else 2,
        "device": "cpu",
        "source": {"commit": "0123456789abcdef", "dirty": False},
        "packages": {"torch": "2.13.0"},
    }


def state(name: str, **changes: Any) -> dict[str, Any]:
    value = {
        "schema_version": "1",
        "run_id": "grpo-20260101-000000-aaaaaaaa",
        "plan_id": "p1",
        "state": name,
        "host": "here",
        **NEVER,
        "heartbeat": 1767229200.0,
        "child": None,
        "step": 4,
        "num_steps": 4,
        "operation": None,
        "checkpoint": None,
        "hint_id": None,
    } | changes
    check_against_schema("state", value)
    return value


def metrics(num_steps: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1.0 / step,
            "reward_mean": 0.25 * step,
            "reward/numeric": 0.25 * step,
            "grad_norm": 0.5,
            "learning_rate": 1e-4,
            "kl": 0.0,
            "entropy": 2.0,
            "logp_gap_mean": 0.01,
            "logp_gap_k3": 0.001,
            "completion_length_mean": 5.0,
            "tokens_per_s": 100.0,
            "peak_memory_bytes": 3 << 30,
            "peak_memory_bytes_per_rank": [3 << 30, 2 << 30],
            "num_steps": num_steps,
            "ledger": {"sampled": 4, "trained": 3, "excluded": {"timeout": 1}},
        }
        for step in range(1, num_steps + 1)
    ]


def rollout(group: int, sample: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"1-{group}-{sample}",
        "group": group,
        "sample": sample,
        "row": group,
        "place": f"rows.jsonl:{group + 1}",
        "seed": 7,
        "version": "base",
        "prompt_ids": [1, 2],
        "completion_ids": [3, 6, 7],
        "logprobs": [-1.0, -0.5, -0.25],
        "text": " the answer\n2",
        "truncated": False,
        "status": "scored",
        "reward": float(sample),
        "parts": {"numeric": float(sample)},
        "advantage": 1.0 if sample else -1.0,
        "error": None,
    } | changes


def batch(step: int, rollouts: list[dict[str, Any]], kind: str = "step", **head: Any) -> str:
    first = {
        "kind": kind,
        "step": step,
        "version": step - 1,
        "digest": "f" * 64,
        "facts": {},
        "tokens": TOKENS,
        "num_rollouts": len(rollouts),
        "ledger": {"sampled": len(rollouts), "trained": len(rollouts) - 1, "excluded": {"timeout": 1}},
    } | head
    return "".join(json.dumps(line) + "\n" for line in (first, *rollouts))


def write_rollouts(folder: Path) -> None:
    """Two steps of two groups, the trainer's log-probs of step 2, and answers to held-out rows before and after."""
    place = folder / "rollouts"
    place.mkdir(parents=True)
    lost = rollout(
        1, 1, status="timeout", reward=None, parts={}, advantage=0.0, error=f"late {HOSTILE}{UNSEEN}"
    )
    flat = rollout(1, 0, completion_ids=[3, 4, 5, 8], logprobs=[-1.0] * 4, advantage=0.0)
    for step in (1, 2):
        (place / f"step-{step:06d}.jsonl").write_text(batch(step, [rollout(0, 0), rollout(0, 1), flat, lost]))
    head = {"kind": "trained", "step": 2, "num_rollouts": 1}
    trained = {"id": "1-0-1", "logprobs": [-1.0, -0.5 + 0.6931471805599453, -0.25 - 0.6931471805599453]}
    (place / "trained-000002.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(trained) + "\n")
    for step, rewards in ((0, (0.0, 1.0, 1.0)), (4, (1.0, 0.0, 1.0))):
        answers = [
            rollout(row, 0, id=f"eval-{row}-0", reward=reward, text=f"answer {row} at {step}")
            for row, reward in enumerate(rewards)
        ]
        (place / f"eval-{step:06d}.jsonl").write_text(batch(step, answers, "eval"))


def write_run(folder: Path, with_rollouts: bool = True, **changes: Any) -> RunFolder:
    """A finished run of two attempts; changes are those of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    value = manifest(folder, **changes)
    (folder / "run.json").write_text(json.dumps(value))
    (folder / "state.json").write_text(json.dumps(state(value["status"], run_id=value["run_id"])))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics()))
    events = [
        {"time": 1767225601.0, "kind": "evaluated", "step": 0, "accuracy": 0.25, "num_rows": 4},
        {"time": 1767225701.0, "kind": "checkpoint", "step": 2, "folder": str(folder / "checkpoints/step-2")},
        {"time": 1767227401.0, "kind": "resumed", "step": 2, "folder": str(folder / "checkpoints/step-2")},
        {
            "time": 1767227402.0,
            "kind": "warning",
            "code": "checkpoint_skipped",
            "text": "step-3 is not whole",
        },
        {"time": 1767229100.0, "kind": "evaluated", "step": 4, "accuracy": 0.75, "num_rows": 4},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if with_rollouts:
        write_rollouts(folder)
    return RunFolder(folder)


class Page(HTMLParser):
    """A page as a browser's parser sees it: tags with their attributes, the texts outside scripts, and the payload."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())
        self.payload: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.texts.append(data)


def opened(path: Path, profile: Path, view: str = "") -> str:
    """Return the document that Chromium has made of a page; skip where there is none. view: what stands after #."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        " --disable-component-update --disable-sync --virtual-time-budget=4000 --dump-dom"
    ).split()
    command = [browser, *flags, f"--user-data-dir={profile}", path.as_uri() + (f"#{view}" if view else "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
