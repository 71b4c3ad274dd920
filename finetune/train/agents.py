"""Rollouts by agents: each works on a task in a box against an endpoint of its own, and a verifier in a fresh box judges.

Rule: what went wrong is data with a name (agent, timeout, limit, verifier, sandbox, server); it is tried again or left out
of the training, and never becomes a reward of zero.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.process import Box, new_workspace
from finetune.config import GrpoConfig
from finetune.data.chat import ChatFormat
from finetune.domains.tasks import Task, TaskScore, load_tasks, prepare_workspace, verify
from finetune.errors import FinetuneError, boundary
from finetune.records import Row
from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.harness import Harness, HarnessOutcome, HarnessSettings, open_harness
from finetune.rollout.ledger import OTHER_VERSION, SCORED, CallRecord, Rollout, session_name, why_unused
from finetune.train.sampling import Draw

# How an agent ended -> what becomes of its rollout; those that are not here are judged by what they left.
_LOST = {"timeout": "timeout", "crashed": "agent", "sandbox": "sandbox", "server": "server"}
_TRIED_AGAIN = ("agent", "sandbox", "server", "verifier", "protocol")
_SEEDS_APART = 1 << 40  # of one try and the next: seeds of rollouts have 40 bits
_BEAT_S = 1.0
Result = TypeVar("Result")


def harness_settings(config: GrpoConfig) -> HarnessSettings:
    """Return what the harness of a run is made with."""
    assert config.max_length is not None, "the plan decides it"
    assert config.max_completion_tokens is not None, "the plan decides it"
    return HarnessSettings(
        context=config.max_length,
        max_new_tokens=config.max_completion_tokens,
        max_steps=config.max_agent_steps,
        program=Path(config.harness_program) if config.harness_program else None,
        command=tuple(config.harness_command),
        agent=config.harness_agent,
        config=Path(config.harness_config) if config.harness_config else None,
        denied=tuple(config.harness_denied),
        tool_timeout_s=config.tool_timeout,
    )


def tool_chat(config: GrpoConfig, tokenizer: Any) -> ChatFormat:
    """Return what renders the conversations of agents; raises what stands in the way of tools (see ChatFormat.problems)."""
    chat = ChatFormat.from_config(config, tokenizer, tools=True)
    if problems := chat.problems():
        raise problems[0]
    return chat


class AgentSampler:
    """Fills rollouts with the work of agents, --agents of them at once.

    chat: made for tools. beat: called each second while agents work; what it raises ends the sampling. Raises Problems
    (bad_task, file_missing) and FinetuneError: no_sandbox, missing_package, and what a template that has no tools raises.
    """

    def __init__(self, config: GrpoConfig, chat: ChatFormat, beat: Callable[[], None]) -> None:
        self.config, self.chat, self.beat = config, chat, beat
        specs = [*config.tasks, *config.eval_tasks]
        self._tasks = {str(task.folder): task for spec in specs for task in load_tasks(spec)}
        self._settings = harness_settings(config)
        self.box: Box = open_box(config.box)

    def sample(self, rollouts: Sequence[Rollout], rows: Sequence[Row], draw: Draw) -> list[Rollout]:
        """As in Sampler. Raises what an engine raises that has not just no answer: it is told to stop, or cannot go on."""
        began = time.perf_counter()
        tasks = [self._tasks[row.values["folder"]] for row in rows]
        settings = BridgeSettings(
            self._settings.context,
            self._settings.max_new_tokens,
            draw.temperature,
            threads=1 if self.config.engine == "local" else self.config.agents,
        )
        judging: list[float] = []
        # In one folder, which goes with what agents still write there when the training is told to stop.
        with (
            new_workspace({}) as place,
            Bridge(draw.engine, self.chat, draw.engine.base, settings) as bridge,
        ):
            jobs = [
                lambda rollout=rollout, task=task: self._worked(bridge, rollout, task, place, judging)
                for rollout, task in zip(rollouts, tasks, strict=True)
            ]
            made = all_done(jobs, self.config.agents, lambda: self._beat(bridge))
            _raise_fault(bridge)
        # Agents work side by side: the share of the wall clock is what judging took of all their time.
        draw.scoring_s += sum(judging) / min(self.config.agents, len(rollouts))
        draw.sampling_s += time.perf_counter() - began
        return made

    def _beat(self, bridge: Bridge) -> None:
        _raise_fault(bridge)
        self.beat()

    def _worked(
        self, bridge: Bridge, rollout: Rollout, task: Task, place: Path, judging: list[float]
    ) -> Rollout:
        """Return the rollout after its work, tried again where a failure was not the policy's."""
        earlier: list[CallRecord] = []
        for tries in range(1, self.config.agent_retries + 2):
            attempt = _Attempt(self, bridge, replace(rollout, agent={"tries": tries}), task)
            with new_workspace({}, place) as workspace:
                made = attempt.made(workspace)
            judging.append(attempt.judged_s)
            made.calls = earlier = earlier + made.calls
            if made.status not in _TRIED_AGAIN:
                break
        return made

    def harness_for(self, task: Task) -> Harness:
        """Return the harness for a task."""
        return open_harness(self.config.harness, replace(self._settings, max_steps=self.most_calls(task)))

    def most_calls(self, task: Task) -> int:
        """Return the budget of calls that settings and task leave."""
        return min(self._settings.max_steps, task.max_steps or self._settings.max_steps)


def _raise_fault(bridge: Bridge) -> None:
    """Raise what an engine raised, which agents take for a missing answer. A prompt that is too long costs that call alone."""
    for error in bridge.errors:
        if error.code != "too_long":
            raise error


@dataclass
class _Attempt:
    """One try of an agent at a task. judged_s: how long the verifier took."""

    sampler: AgentSampler
    bridge: Bridge
    rollout: Rollout
    task: Task
    judged_s: float = 0.0

    def made(self, workspace: Path) -> Rollout:
        rollout, task, box = self.rollout, self.task, self.sampler.box
        began = time.monotonic()
        try:
            prepare_workspace(task, workspace, box)
        except FinetuneError as error:
            if error.code not in ("no_sandbox", "bad_task"):
                raise
            return replace(rollout, status="sandbox", error=f"{task.name}: {error.message}")
        outcome, calls = self._agent(workspace)
        score = None
        if outcome.status not in _LOST:
            judged = time.monotonic()
            score = verify(task, workspace, box)
            self.judged_s = time.monotonic() - judged
        about = {
            "task": task.name,
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "steps": outcome.steps,
            "seconds": round(time.monotonic() - began, 3),
            "log": outcome.log,
            "verifier_log": score.log if score else "",
        }
        return _concluded(replace(rollout, calls=calls, agent=rollout.agent | about), outcome, score)

    def _agent(self, workspace: Path) -> tuple[HarnessOutcome, list[CallRecord]]:
        harness = self.sampler.harness_for(self.task)
        tries = self.rollout.agent["tries"]
        session = self.bridge.open(
            session_name(self.rollout.id, tries),
            self.rollout.seed + (tries - 1) * _SEEDS_APART,
            max_calls=self.sampler.most_calls(self.task),  # whatever the program makes of its own budget
            helper_prompts=harness.helper_prompts,
        )
        try:
            outcome = harness.run(self.task.prompt, workspace, session, self.sampler.box, self.task.limits)
        finally:
            calls = self.bridge.close(session)
        return outcome, calls


def _concluded(rollout: Rollout, outcome: HarnessOutcome, score: TaskScore | None) -> Rollout:
    """Return the rollout with its reward, or with the reason why it has none."""
    used = rollout.used_calls
    last = next((call for call in reversed(used) if call.answer is not None), None)
    rollout.text = (last.answer or {}).get("content", "") if last is not None else ""
    rollout.truncated = outcome.status == "step_limit" or (last is not None and not last.stopped)
    if score is None:
        rollout.status, rollout.error = _LOST[outcome.status], outcome.log[-2000:] or outcome.status
    elif any(why_unused(rollout, call) == OTHER_VERSION for call in rollout.calls):
        rollout.status, rollout.error = "protocol", "the engine changed its version while the agent worked"
    elif not used:
        rollout.status, rollout.error = "agent", "the agent used no answer of the policy"
    elif score.status != "scored":
        rollout.status = "verifier" if score.status == "timeout" else score.status
        rollout.error = score.log[-2000:]
    else:
        rollout.status, rollout.reward, rollout.parts = SCORED, score.reward, dict(score.parts)
    return rollout


def all_done(jobs: Sequence[Callable[[], Result]], at_once: int, beat: Callable[[], None]) -> list[Result]:
    """Do all jobs, `at_once` at a time, and return their results in order; raise what the first that failed raised.

    The threads are daemons: boxes end with the thread that opened them, and nobody waits for an agent once the training
    is told to stop (beat raises).
    """
    waiting = deque(enumerate(jobs))
    results: dict[int, Result] = {}
    faults: list[FinetuneError] = []

    def work() -> None:
        while waiting and not faults:
            try:
                place, job = waiting.popleft()
            except IndexError:
                return
            try:
                with boundary("bug", "an agent's rollout"):
                    results[place] = job()
            except FinetuneError as error:
                faults.append(error)

    threads = [
        threading.Thread(target=work, name=f"agent {number}", daemon=True) for number in range(at_once)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_BEAT_S)
                beat()
    finally:
        waiting.clear()
    if faults:
        raise faults[0]
    return [results[place] for place in range(len(jobs))]
