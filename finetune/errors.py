"""Kinds of failure: each error code with the exit code it leads to; every failure that a user can meet is one of them.

A message says what is wrong, where (file and line, or setting and value) and what to change. What to do next in
full (cause, fix, how to confirm) stands in the hint of the same code, `agent/hints.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

DONE, USAGE, INPUT, ENVIRONMENT, ACCESS, CONFIRM, CONFLICT, TRAINING, WAIT, STOPPED, BUG = (
    0,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    70,
)

EXIT_CODES: dict[str, int] = {
    # usage
    "usage": USAGE,
    "unknown_setting": USAGE,
    "bad_value": USAGE,
    "setting_without_effect": USAGE,
    "settings_conflict": USAGE,
    "batch_arithmetic": USAGE,
    "bad_path": USAGE,
    # data
    "path_outside_roots": INPUT,
    "file_missing": INPUT,
    "no_rows": INPUT,
    "bad_row": INPUT,
    "duplicate_key": INPUT,
    "unknown_columns": INPUT,
    "bad_roles": INPUT,
    "empty_assistant": INPUT,
    "no_supervised_token": INPUT,
    "too_long": INPUT,
    "too_few_rows": INPUT,
    "bad_domain": INPUT,
    "bad_verifier": INPUT,
    "blind_verifier": INPUT,
    "bad_task": INPUT,
    "task_overlap": INPUT,
    "task_check_failed": INPUT,
    "audit_failed": INPUT,
    # model, tokenizer, template
    "model_missing": INPUT,
    "unsafe_model": INPUT,
    "unsupported_model": INPUT,
    "no_chat_template": INPUT,
    "bad_template": INPUT,
    "template_not_prefix_stable": INPUT,
    "tokens_past_embedding": INPUT,
    "no_stop_token": INPUT,
    "bad_adapter": INPUT,
    "bad_rollouts": INPUT,
    "bad_profile": INPUT,
    "not_enough_devices": INPUT,
    "engine_model": INPUT,
    "packing_unsafe": INPUT,
    "not_enough_memory": INPUT,
    "not_enough_disk": INPUT,
    "preflight_failed": INPUT,
    # environment
    "no_device": ENVIRONMENT,
    "device_hidden": ENVIRONMENT,
    "missing_package": ENVIRONMENT,
    "broken_package": ENVIRONMENT,
    "engine_unfit": ENVIRONMENT,
    "engine_missing": ENVIRONMENT,
    "supervisor_failed": ENVIRONMENT,
    "no_sandbox": ENVIRONMENT,
    # access
    "access_denied": ACCESS,
    "offline": ACCESS,
    # confirmation and conflict
    "needs_confirmation": CONFIRM,
    "plan_conflict": CONFLICT,
    "run_in_use": CONFLICT,
    "target_exists": CONFLICT,
    "run_missing": INPUT,
    "no_checkpoint": INPUT,
    # training
    "out_of_memory": TRAINING,
    "disk_full": TRAINING,
    "non_finite": TRAINING,
    "no_learning_signal": TRAINING,
    "no_gradient": TRAINING,
    "rank_died": TRAINING,
    "job_died": TRAINING,
    "rollout_failures": TRAINING,
    "verifier_failed": TRAINING,
    "engine_failed": TRAINING,
    "engine_out_of_memory": TRAINING,
    "engine_timeout": TRAINING,
    "sync_unproved": TRAINING,
    "rank_stuck": TRAINING,
    "bad_checkpoint": TRAINING,
    "bad_export": TRAINING,
    "training_failed": TRAINING,
    # endings that are no fault
    "still_running": WAIT,
    "stopped": STOPPED,
    "over_budget": STOPPED,
    "disk_nearly_full": STOPPED,
    "bug": BUG,
}

# Facts that stop nothing but that a user should know before paying for a run; each has a hint of the same id.
WARNINGS: frozenset[str] = frozenset(
    {
        "cpu_training",
        "oversubscribed",
        "unsuited_correction",
        "no_engine",
        "sampler_mismatch",
        "low_entropy",
        "idle_setting",
        "prepared_reused",
        "stop_token_differs",
        "pad_is_stop_token",
        "text_beside_template",
        "special_text_kept_as_text",
        "template_ignores_tools",
        "reasoning_dropped",
        "duplicate_rows",
        "train_eval_overlap",
        "rows_dropped",
        "rows_truncated",
        "no_eval_rows",
        "few_steps",
        "remote_code",
        "checkpoint_skipped",
        "warm_start",
        "differs_from_last_attempt",
        "tracker_failed",
        "verifier_not_checked",
        "low_memory",
        "low_disk",
        "low_shared_memory",
        "slow_dtype",
    }
)


class FinetuneError(Exception):
    """A failure with a code of EXIT_CODES, a message for people, and evidence (JSON values) for programs."""

    def __init__(self, code: str, message: str, **evidence: Any) -> None:
        if code not in EXIT_CODES:
            raise TypeError(f"{code!r} is no error code")
        super().__init__(message)
        self.add_note(f"error code: {code}")  # so that a traceback in any log tells it
        self.code = code
        self.message = message
        self.evidence = evidence

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.code]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.code, self.message, self.evidence)


def _rebuilt(code: str, message: str, evidence: dict[str, Any]) -> FinetuneError:
    return FinetuneError(code, message, **evidence)


class Problems(Exception):
    """Several failures found together, so that a user mends them in one go; the first decides the exit code."""

    def __init__(self, errors: list[FinetuneError]) -> None:
        if not errors:
            raise TypeError("Problems() needs at least one error")
        super().__init__("; ".join(error.message for error in errors))
        self.add_note(f"error code: {errors[0].code}")
        self.errors = errors

    @property
    def exit_code(self) -> int:
        return self.errors[0].exit_code


@contextlib.contextmanager
def boundary(code: str, where: str) -> Iterator[None]:
    """Give every foreign exception that crosses from `where` (user code, a library's loader) the type of this boundary."""
    try:
        yield
    except (FinetuneError, Problems):
        raise
    except Exception as error:
        text = f"{where}: {type(error).__name__}: {str(error)[:2000]}"
        raise FinetuneError(code, text, exception=type(error).__name__) from error
