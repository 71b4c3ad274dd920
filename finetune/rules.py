"""What binds several settings: the arithmetic of a step, and what cannot be meant together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from finetune.config import GrpoConfig, RunConfig, SftConfig
from finetune.errors import FinetuneError

DEFAULT_GLOBAL_BATCH = 16
DEFAULT_PROMPTS = 8
DEFAULT_COMPLETION_TOKENS = 512
DEFAULT_BUILTIN_COMPLETION_TOKENS = 32
DEFAULT_MAX_LENGTH = 2048
DEFAULT_FORWARD_TOKENS = {"cuda": 8192, "cpu": 1024}
TASKS = "tasks:"  # before a spec of tasks, as a source of rows: each task is a row that asks its prompt
_LARGEST_GROUP = 1024  # that group_size may be
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes, but for 1


def global_batch(config: RunConfig) -> int:
    """Return the rows of one optimizer step: as asked, or batch per GPU x accumulation x ranks, or 16.

    Raises FinetuneError(batch_arithmetic) where the three contradict each other, with the nearest numbers that do not.
    """
    per_gpu, accumulation, ranks, asked = (
        config.batch_size_per_gpu,
        config.gradient_accumulation,
        config.num_gpus,
        config.global_batch_size,
    )
    if per_gpu and accumulation:
        product = per_gpu * accumulation * ranks
        if asked and asked != product:
            raise FinetuneError(
                "batch_arithmetic",
                f"global_batch_size {asked} is not batch_size_per_gpu {per_gpu} x gradient_accumulation {accumulation}"
                f" x num_gpus {ranks} = {product}; give --global-batch-size {product} or leave one of the three out",
                valid=[product],
            )
        return product
    return asked or (per_gpu or accumulation or 0) * ranks or _default_batch(config)


def _default_batch(config: RunConfig) -> int:
    return DEFAULT_PROMPTS * config.group_size if isinstance(config, GrpoConfig) else DEFAULT_GLOBAL_BATCH


def prompts_per_batch(config: GrpoConfig) -> int:
    """Return the prompts of one batch of rollouts.

    Raises FinetuneError(batch_arithmetic), with the nearest numbers that fit, where groups do not fill the batch.
    """
    rollouts, size = global_batch(config), config.group_size
    if rollouts % size:
        near = sorted({max(size, rollouts // size * size), (rollouts // size + 1) * size})
        sizes = sorted(
            (number for number in range(2, min(rollouts, _LARGEST_GROUP) + 1) if rollouts % number == 0),
            key=lambda number: abs(number - size),
        )[:2]
        text = (
            f"global_batch_size {rollouts} rollouts cannot be split into groups of group_size {size}; give"
            f" --global-batch-size {' or '.join(map(str, near))}"
        )
        text += f", or --group-size {' or '.join(map(str, sorted(sizes)))}" if sizes else ""
        raise FinetuneError("batch_arithmetic", text, valid=near, valid_group_sizes=sorted(sizes))
    return rollouts // size


def rows_per_forward(config: RunConfig) -> int | None:
    """Return the rows of one forward at most, where the user set them by batch per GPU or by accumulation."""
    if config.batch_size_per_gpu:
        return config.batch_size_per_gpu
    if config.gradient_accumulation:
        return max(1, math.ceil(global_batch(config) / (config.gradient_accumulation * config.num_gpus)))
    return None


def forward_tokens(config: RunConfig) -> int:
    """Return the tokens of one forward at most, padding included; a longer row goes alone."""
    return config.micro_batch_tokens or DEFAULT_FORWARD_TOKENS["cuda" if config.device == "cuda" else "cpu"]


def steps_of(config: RunConfig, num_rows: int) -> int:
    """Return the optimizer steps of the run: the short last step of each epoch counts as one."""
    if config.max_steps is not None:
        return config.max_steps
    whole, part = divmod(config.epochs, 1.0)
    passes = config.passes if isinstance(config, GrpoConfig) else 1
    size = prompts_per_batch(config) if isinstance(config, GrpoConfig) else global_batch(config)
    batches = int(whole) * math.ceil(num_rows / size) + math.ceil(round(part * num_rows, 6) / size)
    return batches * passes


def served_lora_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can serve and that holds `rank`; raises FinetuneError(bad_value) above 512."""
    for served in LORA_RANKS:
        if rank <= served:
            return served
    text = (
        f"lora_rank {rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}; lower it or take --sync merged"
    )
    raise FinetuneError("bad_value", text, setting="lora_rank", most=LORA_RANKS[-1])


def longest_prompt(config: GrpoConfig) -> int:
    """Return the tokens that a prompt may have, so that prompt and completion fit into max_length."""
    limits = config.max_length, config.max_completion_tokens
    assert None not in limits, "the plan decides both"
    return (limits[0] or 0) - (limits[1] or 0)


def most_sampled(config: GrpoConfig) -> int:
    """Return the tokens that one rollout samples at most, over all answers of an agent."""
    return (config.max_completion_tokens or 0) * (config.max_agent_steps if config.tasks else 1)


def contradictions(config: RunConfig, set_by_user: set[str]) -> Iterator[FinetuneError]:
    """Yield what cannot be meant: settings of the user that contradict each other or that nothing would read."""
    yield from _arithmetic_faults(config)
    for name, reason in _without_effect(config):
        if name in set_by_user:
            yield FinetuneError(
                "setting_without_effect", f"{name}: has no effect {reason}; leave it out", setting=name
            )
    for name, text in _conflicts(config, set_by_user):
        yield FinetuneError("settings_conflict", text, setting=name)


def _arithmetic_faults(config: RunConfig) -> Iterator[FinetuneError]:
    try:
        if isinstance(config, GrpoConfig):
            prompts_per_batch(config)
        else:
            global_batch(config)
    except FinetuneError as error:
        yield error


def _without_effect(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that nothing reads beside the others, each with the reason."""
    if config.tuning == "full":
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "init_adapter"):
            yield name, "with tuning full"
    elif config.init_adapter:
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            yield name, "with init_adapter, which brings its own"
    if config.max_steps is not None:
        yield "epochs", "beside max_steps"
    if config.eval_data:
        for name in ("eval_fraction", "split_seed"):
            yield name, "beside eval_data"
    elif config.eval_fraction == 0:
        yield "split_seed", "with eval_fraction 0, which holds out no rows"
    if config.device == "cpu" and config.deterministic:
        yield "deterministic", "on the cpu, which is deterministic at a fixed number of threads"
    if isinstance(config, GrpoConfig):
        yield from _grpo_without_effect(config)


def _grpo_without_effect(config: GrpoConfig) -> Iterator[tuple[str, str]]:
    if config.loss == "cispo":
        for name in ("clip_low", "clip_high", "delta"):
            yield name, "with loss cispo, which caps the ratio by clip_cispo"
    else:
        yield "clip_cispo", f"with loss {config.loss}"
    if config.loss == "gspo":
        yield "delta", "with loss gspo"
    if config.beta == 0:
        yield "reference", "with beta 0"
    if not (config.correction or "").endswith("_mask"):
        yield (
            "correction_floor",
            f"with correction {config.correction or 'by truncation'}, which has an upper bound alone",
        )
    if config.tasks:
        for name in _VERIFIER_SETTINGS:
            yield name, "with tasks, whose own verifiers give the rewards"
        yield "overlong_buffer", "with tasks: what limits an agent is its steps"
        if config.eval_tasks:
            for name in ("eval_fraction", "split_seed"):
                yield name, "beside eval_tasks"
    else:
        for name in AGENT_SETTINGS:
            yield name, "without tasks"
    yield from _harness_without_effect(config)
    if config.replay:
        for name in (*_ENGINE_SETTINGS, "engine", "sync", "sync_retries"):
            yield name, "beside replay, which uses no engine"
    elif config.engine == "local":
        for name in (*_ENGINE_SETTINGS, "sync", "sync_retries", "request_timeout"):
            yield name, "with engine local"
    elif config.vllm_url:
        for name in _OWN_SERVER_SETTINGS:
            yield name, "beside vllm_url, whose servers run already"


def _harness_without_effect(config: GrpoConfig) -> Iterator[tuple[str, str]]:
    readers = {
        "harness_program": ("opencode", "mini", "command"),
        "harness_command": ("command",),
        "harness_agent": ("opencode",),
        "harness_config": ("opencode", "mini"),
        "harness_denied": ("opencode",),
        "tool_timeout": ("loop", "mini"),
    }
    for name, harnesses in readers.items():
        if config.harness not in harnesses:
            yield name, f"with harness {config.harness}"


def _conflicts(config: RunConfig, set_by_user: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(config, SftConfig) and config.early_stopping and not config.eval_every:
        yield (
            "early_stopping",
            "early_stopping needs eval_every: without it the loss is evaluated at the end only",
        )
    if config.profile and "parallel" in set_by_user:
        yield "parallel", "profile and parallel both say how ranks share the work; give one of them"
    if not isinstance(config, GrpoConfig):
        return
    if config.tuning == "full" and config.beta:
        yield (
            "beta",
            "beta: the reference is the policy without its adapter, and tuning full has none; take beta 0",
        )
    if config.tuning == "full" and config.sync == "adapter":
        yield "sync", "sync adapter: with tuning full there is no adapter; leave --sync out"
    if config.sync == "merged" and config.rollout_tp > 1:
        text = "sync merged cannot be proved on engines of several devices; take --sync adapter or --rollout-tp 1"
        yield "sync", text
    if config.loss == "gspo" and config.correction in ("token_truncate", "token_mask"):
        text = f"correction {config.correction} is by token and gspo's ratio is of a rollout; take sequence_truncate"
        yield "correction", text
    if config.engine == "vllm" and not config.replay and not 0.01 <= config.temperature <= 2:
        text = f"temperature {config.temperature:g}: vLLM samples between 0.01 and 2 and would bend others in silence"
        yield "temperature", text
    yield from _task_conflicts(config)
    limit = config.max_completion_tokens
    if limit is not None and config.overlong_buffer >= limit:
        text = f"overlong_buffer {config.overlong_buffer} leaves nothing of max_completion_tokens {limit}"
        yield "overlong_buffer", text
    if limit is not None and config.max_length is not None and limit >= config.max_length:
        text = f"max_completion_tokens {limit} leaves no room for a prompt in max_length {config.max_length}"
        yield "max_completion_tokens", text
    low, high = config.correction_floor, config.correction_cap
    if low is not None and high is not None and low >= high:
        yield "correction_floor", f"correction_floor {low} is not below correction_cap {high}"


def _task_conflicts(config: GrpoConfig) -> Iterator[tuple[str, str]]:
    if not config.tasks:
        return
    for ours, data in ((config.tasks, config.data), (config.eval_tasks, config.eval_data)):
        if data and data != task_sources(ours):
            yield (
                "data",
                "tasks are the data of a run: leave --data and --eval-data out, and give --eval-tasks",
            )
            return
    if config.harness == "command" and not config.harness_command:
        yield "harness_command", "harness command needs --harness-command: the program and its arguments"
    if config.harness in ("opencode", "mini") and config.harness_program is None:
        what = {"opencode": "opencode's executable", "mini": "the virtual environment of mini-swe-agent"}
        text = f"harness {config.harness} needs --harness-program: {what[config.harness]}"
        yield "harness_program", text


def task_sources(specs: list[str]) -> list[str]:
    """Return the sources of rows that tasks are."""
    return [f"{TASKS}{spec}" for spec in specs]


_SHORT_COMPLETION, _LONG_COMPLETION = 256, 2000  # tokens


def unsuited_correction(config: GrpoConfig) -> str | None:
    """Return why the correction does not suit completions of this length, or None: a warning, not a refusal."""
    limit, correction = (
        config.max_completion_tokens,
        config.correction or ("sequence_truncate" if config.loss == "gspo" else ""),
    )
    if limit is not None and correction == "geometric_mask" and limit < _SHORT_COMPLETION:
        return (
            f"geometric_mask with completions of {limit} tokens at most: the noise of bf16, 0.04 nats a token, moves"
            " the mean of a short rollout out of its bounds, and nearly all are left out"
        )
    if limit is not None and correction.startswith("sequence_") and limit > _LONG_COMPLETION:
        return (
            f"{correction} multiplies the ratios of up to {limit} tokens: beyond {_LONG_COMPLETION} a slight mismatch"
            " takes whole rollouts out of their bounds; geometric_mask suits them better"
        )
    return None


# What only servers read, and of these what only our own servers read.
_OWN_SERVER_SETTINGS = (
    "rollout_gpus rollout_tp vllm_python vllm_args vllm_memory_fraction vllm_start_timeout".split()
)
AGENT_SETTINGS = (
    "eval_tasks harness harness_program harness_command harness_agent harness_config harness_denied max_agent_steps"
    " tool_timeout agents agent_retries box"
).split()
_VERIFIER_SETTINGS = "verifier verifier_args verifier_timeout verifier_workers on_verifier_error".split()
_ENGINE_SETTINGS = [*_OWN_SERVER_SETTINGS, "vllm_url", "concurrency"]


def idle_at_size_one(config: RunConfig, set_by_user: set[str]) -> list[str]:
    """Return the settings of several ranks that a single rank does not read: a warning, so that one command line scales."""
    if config.num_gpus > 1:
        return []
    return sorted(set_by_user & {"parallel", "distributed_timeout"})
