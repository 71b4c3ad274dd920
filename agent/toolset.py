"""The tools of a language model, in their order: which verb each is, what a model is told of it, and what it may do.

Their arguments are not written here: they are the flags of the verb and the settings of finetune/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_RUN = "A run is named by its run_id or run_dir, valid as long as its folder stands; this server keeps nothing of it."
_JOB = (
    "Returns at once with data.job_id; ft_status {run: JOB_ID} gives the result. The job goes on without this server,"
    " and its id is valid as long as its folder stands."
)
# What check_data and evaluate show of the settings; the others are taken all the same.
_ABOUT_DATA = (
    "model data eval_data eval_fraction eval_rows domain data_format map system_prompt chat_template max_length on_long"
    " on_bad_row learn verifier device seed"
).split()


@dataclass(frozen=True)
class Tool:
    """One tool: the verb it is, what a model is told of it, and the four hints of MCP."""

    name: str
    verb: str
    description: str
    example: Mapping[str, Any]
    read_only: bool
    open_world: bool
    destructive: bool = False
    idempotent: bool = True
    settings: tuple[str, ...] | None = ()  # those that the schema shows; None: all that are not advanced
    at_most: Mapping[str, float] = field(
        default_factory=dict
    )  # bounds that are narrower than those of the flag
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they are others than those of the flag


_SFT = {"method": "sft", "settings": {"model": "builtin:tiny", "data": ["rows.jsonl"]}}
TOOLS = (
    Tool(
        "ft_doctor",
        "doctor",
        "Look at this machine: devices, memory, disk, packages, vLLM, and what is broken with its fix. Start here."
        " With quick=false the packages are imported too, which takes many seconds and is a job: data.job_id, and"
        " ft_status {run: JOB_ID} gives the result. Next: ft_check_data.",
        {},
        read_only=True,
        open_world=False,
        defaults={"quick": True},
    ),
    Tool(
        "ft_check_data",
        "check-data",
        "Read all rows as a run would: row ledger, lengths, duplicates, three rows with the learned text marked."
        f" {_JOB} Next: mend the rows, then ft_plan.",
        _SFT,
        read_only=True,
        open_world=False,
        settings=tuple(_ABOUT_DATA),
    ),
    Tool(
        "ft_plan",
        "plan",
        "Say what a run would do and cost, without doing it: every value with its source, steps, memory, time, disk,"
        " problems. Writes nothing but the plan's record, which is valid until its data, model or settings change."
        " Next: ft_start {plan: data.plan_id}.",
        _SFT,
        read_only=True,
        open_world=True,
        settings=None,
    ),
    Tool(
        "ft_start",
        "start",
        "Start a run in the background and return its run_id within seconds: of a plan ({plan: PLAN_ID}, exactly that"
        " one), or of method and settings. Called again it returns the same run; one that ended early is resumed. A"
        f" cost above the stated budget needs confirm. {_RUN} It outlives this server. Next: ft_status {{run, wait}}.",
        {"plan": "0123456789abcdef"},
        read_only=False,
        open_world=True,
        settings=None,
    ),
    Tool(
        "ft_status",
        "status",
        "Say how a run or a job stands: state, step, loss, time left, health, errors with their fix; of a finished job"
        " the result. With wait it returns at the end, or after so many seconds with error still_running, which is no"
        f" failure: call it again after data.suggested_poll_s. {_RUN} Next: ft_evaluate or ft_export, or"
        " ft_explain_error.",
        {"run": "RUN_ID", "wait": 50},
        read_only=True,
        open_world=False,
        at_most={"wait": 50},
    ),
    Tool(
        "ft_logs",
        "logs",
        f"Show lines of a run's logs, the last ones or from an offset on; next_offset tells where to go on. {_RUN}"
        " Next: ft_explain_error.",
        {"run": "RUN_ID", "grep": "Error"},
        read_only=True,
        open_world=False,
    ),
    Tool(
        "ft_list_runs",
        "list",
        "List the runs of this user, newest first: find a run again whose id was lost. Next: ft_status.",
        {},
        read_only=True,
        open_world=False,
    ),
    Tool(
        "ft_stop",
        "stop",
        "Have a run finish its step, save and end; what is still alive after the grace time is killed. Stopping a run"
        f" that has ended changes nothing. Returns at once. {_RUN} Next: ft_status {{run: RUN}} until it has ended, then"
        " ft_resume.",
        {"run": "RUN_ID"},
        read_only=False,
        open_world=False,
        destructive=True,
    ),
    Tool(
        "ft_resume",
        "resume",
        "Go on in the background with a run that was stopped, preempted or lost, or that failed, from its newest"
        f" checkpoint; with extend to more steps. {_RUN} Next: ft_status.",
        {"run": "RUN_ID"},
        read_only=False,
        open_world=True,
    ),
    Tool(
        "ft_evaluate",
        "evaluate",
        "Loss and accuracy on held-out rows: of a run (or its base model, or a checkpoint), or of a model by method and"
        f" settings. {_JOB} Next: ft_export.",
        {"run": "RUN_ID"},
        read_only=True,
        open_world=True,
        settings=tuple(_ABOUT_DATA),
    ),
    Tool(
        "ft_generate",
        "generate",
        f"Answer prompts with what a run trained, or with its base model. {_JOB}",
        {"run": "RUN_ID", "prompt": ["What is 2 + 2?"]},
        read_only=True,
        open_world=False,
    ),
    Tool(
        "ft_export",
        "export",
        "Write the result of a run as a whole model or as an adapter, and check what was written. A target that holds"
        f" the same is left as it is, another one is refused. {_JOB}",
        {"run": "RUN_ID", "kind": "merged"},
        read_only=False,
        open_world=False,
    ),
    Tool(
        "ft_explain_error",
        "explain-error",
        "Explain an error code, a failed run, a log file or the text of an error: cause, fix, how to confirm."
        " Says unknown of what it does not know.",
        {"what": "not_enough_memory"},
        read_only=True,
        open_world=False,
    ),
    Tool(
        "ft_report",
        "report",
        "Write one self-contained HTML page of a run, or of several to compare: curves, data, settings, rollouts,"
        f" warnings. {_RUN}",
        {"run": ["RUN_ID"]},
        read_only=False,
        open_world=False,
    ),
)
BY_NAME = {tool.name: tool for tool in TOOLS}
