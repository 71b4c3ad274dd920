"""Every setting of every method, each declared once; the arithmetic and the rules that bind several of them are in rules.py.

A value of "auto" or None is decided by the plan before the engine sees it; the engine gets concrete values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.agent_config import AgentConfig
from finetune.knobs import knob


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every method needs: model, data, ranks, step arithmetic, optimizer, adapter, checkpoints."""

    model: str = knob(
        help="model folder, Hub id, builtin:smollm2-135m or builtin:tiny[?vocabulary=N&context=N&template=NAME&seed=N&tied=1]"
    )
    data: list[str] = knob(
        help="training rows: files, folders, Hub ids or builtin:arithmetic; weights as a.jsonl:0.7"
    )
    out: str = knob("auto", help="run folder; auto makes runs/<run id>", identity=False)
    revision: str | None = knob(None, help="revision of a Hub model", advanced=True)
    trust_remote_code: bool = knob(
        False, help="let the model folder run its own code (dangerous)", advanced=True
    )
    domain: str = knob(
        "auto",
        help="what a row means and how an answer scores: auto, text, math, or a Python file with the four functions",
    )
    eval_data: list[str] = knob([], help="held-out rows; without them --eval-fraction of the training rows")
    eval_fraction: float = knob(
        0.05,
        at_least=0,
        below=1,
        help="share of the training rows held out when there is no --eval-data (rounded down)",
    )
    eval_every: int | None = knob(
        None, at_least=1, help="evaluate held-out loss every so many steps; none: before and after only"
    )
    eval_rows: int = knob(200, at_least=1, help="held-out rows used at most")
    split_seed: int = knob(0, at_least=0, help="seed of the held-out split", advanced=True)
    data_format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = knob(
        "auto", help="form of the rows"
    )
    map: list[str] = knob([], help="columns to rename, as prompt=question completion=answer")
    system_prompt: str | None = knob(None, help="system turn put before every conversation that has none")
    chat_template: str | None = knob(
        None, help="chat template instead of the model's: a file or a name (chatml)"
    )
    chat_template_args: list[str] = knob(
        [], help="template arguments as key=value (thinking switches)", advanced=True
    )
    max_length: int | None = knob(
        None, at_least=8, help="tokens of a row at most; none: the model's context, 2048 at most"
    )
    on_long: Literal["error", "truncate-prompt", "drop"] = knob(
        "error", help="what becomes of longer rows; never cut in silence"
    )
    on_bad_row: Literal["error", "drop"] = knob(
        "error", help="what becomes of rows that cannot be trained (empty answer, bad roles)"
    )
    epochs: float = knob(1.0, above=0, at_most=1000, help="passes over the rows, unless --max-steps is given")
    max_steps: int | None = knob(None, at_least=1, help="optimizer steps, instead of --epochs")
    max_hours: float | None = knob(
        None, above=0, help="hours of training, then it saves and stops; none: no limit", identity=False
    )
    max_disk_gb: float | None = knob(
        None,
        above=0,
        help="GB that the run folder may take, else it saves and stops; none: no limit",
        identity=False,
        advanced=True,
    )
    global_batch_size: int | None = knob(
        None,
        at_least=1,
        help="rows of one optimizer step over all ranks; none: 16, or from --batch-size-per-gpu",
    )
    batch_size_per_gpu: int | None = knob(
        None, at_least=1, help="rows of one forward on one rank", identity=False, advanced=True
    )
    gradient_accumulation: int | None = knob(
        None, at_least=1, help="forwards of one step on one rank", identity=False, advanced=True
    )
    micro_batch_tokens: int | None = knob(
        None,
        at_least=8,
        help="tokens, padding included, of one forward at most; none: 8192 on cuda, 1024 on cpu",
        identity=False,
    )
    learning_rate: float = knob(2e-4, at_least=0, at_most=1, help="peak learning rate of AdamW")
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine", help="learning rate after the warmup")
    warmup_ratio: float = knob(
        0.03, at_least=0, below=1, help="share of the steps with a rising learning rate (rounded down)"
    )
    weight_decay: float = knob(
        0.0, at_least=0, at_most=1, help="decoupled weight decay of AdamW", advanced=True
    )
    max_grad_norm: float = knob(1.0, at_least=0, help="gradients are clipped to this norm; 0: never")
    tuning: Literal["lora", "full"] = knob("lora", help="train adapters, or all weights")
    lora_rank: int = knob(16, at_least=1, at_most=512, help="rank of the adapters")
    lora_alpha: float = knob(32.0, above=0, help="adapters are scaled by alpha / rank")
    lora_dropout: float = knob(0.0, at_least=0, below=1, help="dropout before the adapters")
    lora_targets: str = knob(
        "all-linear",
        help="modules that get adapters: all-linear (never embeddings or lm_head), or names with commas",
    )
    init_adapter: str | None = knob(None, help="adapter to start from (a warm start, not a resume)")
    dtype: Literal["auto", "bf16", "fp32"] = knob(
        "auto", help="compute type; adapters and optimizer are fp32 always"
    )
    gradient_checkpointing: bool | None = knob(
        None, help="recompute activations to save memory; none: on cuda yes, on cpu no", identity=False
    )
    attention: Literal["auto", "sdpa", "short_rows", "eager", "flash_attention_2"] = knob(
        "auto",
        help="attention kernel; auto: sdpa, on the cpu short_rows, which is faster below 512 tokens",
        identity=False,
        advanced=True,
    )
    num_gpus: int = knob(
        1, at_least=1, at_most=64, help="ranks: devices on cuda, processes on cpu", identity=False
    )
    device: Literal["auto", "cuda", "cpu"] = knob("auto", help="where to train", identity=False)
    parallel: Literal["auto", "ddp", "fsdp2"] = knob(
        "auto", help="how several ranks share the work", identity=False
    )
    profile: str | None = knob(None, help="Accelerate YAML instead of --parallel", identity=False)
    deterministic: bool = knob(False, help="deterministic kernels on cuda", advanced=True, identity=False)
    threads: int | None = knob(
        None, at_least=1, help="CPU threads of a rank; none: cores / ranks", advanced=True, identity=False
    )
    distributed_timeout: float = knob(
        1800.0, at_least=5, help="seconds after which a collective gives up", advanced=True, identity=False
    )
    seed: int = knob(
        0, at_least=0, at_most=2**31 - 1, help="seed of the row order, the adapters' start and dropout"
    )
    checkpoint_every: int = knob(50, at_least=1, help="steps between checkpoints", identity=False)
    checkpoints_kept: int = knob(
        2, at_least=1, help="newest checkpoints kept, besides the best", identity=False, advanced=True
    )
    report_to: Literal["none", "tensorboard"] = knob(
        "none", help="tracker beside metrics.jsonl", identity=False, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """Supervised finetuning on conversations, prompt-completion pairs or text."""

    learn: Literal["all", "last"] = knob("all", help="assistant turns that are learned")
    packing: bool = knob(
        False, help="put several rows into one sequence (they never attend to each other)", identity=False
    )
    early_stopping: int | None = knob(
        None, at_least=1, help="stop after so many evaluations without a lower loss", advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(AgentConfig, RunConfig):
    """Reinforcement learning with group-relative advantages, on completions that the policy itself samples."""

    data_format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = knob(
        "auto", help="form of the rows", advanced=True
    )
    on_bad_row: Literal["error", "drop"] = knob(
        "error", help="what becomes of rows without a prompt or with bad roles", advanced=True
    )
    chat_template: str | None = knob(
        None, help="chat template instead of the model's: a file or a name (chatml)", advanced=True
    )
    global_batch_size: int | None = knob(
        None, at_least=2, help="rollouts of one batch over all ranks; none: 8 prompts x --group-size"
    )
    learning_rate: float = knob(1e-5, at_least=0, at_most=1, help="peak learning rate of AdamW")
    warmup_ratio: float = knob(
        0.0, at_least=0, below=1, help="share of the steps with a rising learning rate", advanced=True
    )
    schedule: Literal["cosine", "linear", "constant"] = knob(
        "constant", help="learning rate after the warmup", advanced=True
    )
    weight_decay: float = knob(
        0.0, at_least=0, at_most=1, help="decoupled weight decay of AdamW", advanced=True
    )
    lora_dropout: float = knob(
        0.0, at_least=0, at_most=0, help="always 0: with dropout no ratio would be exact", advanced=True
    )
    lora_targets: str = knob(
        "all-linear",
        help="modules that get adapters: all-linear (never embeddings or lm_head), or names with commas",
        advanced=True,
    )
    gradient_checkpointing: bool | None = knob(
        None,
        help="recompute activations to save memory; none: on cuda yes, on cpu no",
        identity=False,
        advanced=True,
    )
    micro_batch_tokens: int | None = knob(
        None,
        at_least=8,
        help="tokens, padding included, of one forward at most; none: 8192 on cuda, 1024 on cpu",
        identity=False,
        advanced=True,
    )
    verifier: list[str] = knob(
        ["auto"],
        help="what scores a completion: auto (the domain's own), exact, numeric, regex, choice, json-schema, math,"
        " python-tests or FILE.py:function; several with weights as numeric:0.8",
    )
    verifier_args: list[str] = knob([], help="verifier arguments as key=value", advanced=True)
    verifier_timeout: float = knob(
        10.0, above=0, help="seconds a verifier has for one completion", advanced=True, identity=False
    )
    verifier_workers: int = knob(
        2, at_least=1, at_most=256, help="verifier processes", advanced=True, identity=False
    )
    on_verifier_error: Literal["skip", "stop"] = knob(
        "skip", help="what becomes of a rollout whose verifier failed", advanced=True
    )
    max_failure_share: float = knob(
        0.1,
        at_least=0,
        at_most=1,
        help="share of a step's rollouts that may be lost to failures",
        advanced=True,
    )
    group_size: int = knob(
        8, at_least=2, at_most=1024, help="completions of one prompt in a step (2 or more)"
    )
    temperature: float = knob(1.0, above=0, at_most=10, help="sampling temperature")
    max_generated_tokens: int | None = knob(
        None,
        at_least=1,
        help="tokens sampled in all, held-out answers included, then it saves and stops; none: no limit",
        identity=False,
        advanced=True,
    )
    max_completion_tokens: int | None = knob(
        None, at_least=1, help="tokens of a completion at most; none: 512 (32 for builtin data)"
    )
    truncated: Literal["score", "mask"] = knob(
        "score",
        help="completions cut by the limit: scored like others, or left out of the training",
        advanced=True,
    )
    overlong_buffer: int = knob(
        0,
        at_least=0,
        help="last tokens before the limit over which a penalty rises to 1; 0: none",
        advanced=True,
    )
    loss: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] = knob(
        "dapo", help="loss and its normalisation"
    )
    scale_rewards: Literal["group", "batch", "none"] = knob(
        "group", help="standard deviation that divides an advantage", advanced=True
    )
    clip_low: float | None = knob(
        None, above=0, below=1, help="lower clip of the ratio; none: 0.2 (gspo 3e-4)", advanced=True
    )
    clip_high: float | None = knob(
        None, above=0, help="upper clip of the ratio; none: 0.2 (gspo 4e-4)", advanced=True
    )
    clip_cispo: float = knob(4.0, above=0, help="cispo caps the ratio at 1 + this", advanced=True)
    delta: float | None = knob(
        None, above=1, help="cap of the unclipped ratio (two-sided clip); none: no cap", advanced=True
    )
    beta: float = knob(0.0, at_least=0, help="weight of the KL to the reference; 0: no reference is computed")
    reference: Literal["start", "base"] = knob(
        "start", help="reference of the KL: the start adapter, frozen, or the bare model", advanced=True
    )
    correction: (
        Literal["token_truncate", "token_mask", "geometric_mask", "sequence_truncate", "sequence_mask"] | None
    ) = knob(
        None,
        help="weight for the mismatch of sampler and trainer; none: token_truncate (gspo sequence_truncate)",
        advanced=True,
    )
    correction_cap: float | None = knob(
        None, above=0, help="upper bound of that weight; none: 2 (geometric 1.01, sequence 3)", advanced=True
    )
    correction_floor: float | None = knob(
        None, at_least=0, help="lower bound, of the masks; none: 0 (geometric 0.99)", advanced=True
    )
    passes: int = knob(
        1, at_least=1, at_most=64, help="optimizer steps on one batch of rollouts", advanced=True
    )
    resample_zero_variance: int = knob(
        0,
        at_least=0,
        at_most=16,
        help="rounds in which groups of equal rewards are replaced by other prompts",
        advanced=True,
    )
    max_staleness: int = knob(
        0, at_least=0, at_most=4, help="versions that sampling may lag behind; 0: sample, then train"
    )
    engine: Literal["vllm", "local"] = knob(
        "vllm", help="what samples: vLLM servers, or transformers in this process", identity=False
    )
    rollout_gpus: int | None = knob(
        None,
        at_least=0,
        at_most=64,
        help="devices for engines (engines on cpu); 0 on cuda: share the ranks' devices; none: 1, or what is left",
        identity=False,
    )
    rollout_tp: int = knob(
        1, at_least=1, help="devices of one engine (tensor parallel)", advanced=True, identity=False
    )
    vllm_url: list[str] = knob(
        [], help="running vLLM servers instead of own ones", advanced=True, identity=False
    )
    vllm_python: str | None = knob(
        None, help="Python of another environment that has vLLM", advanced=True, identity=False
    )
    vllm_args: list[str] = knob(
        [], help="more arguments of the server, as max-num-seqs=64", advanced=True, identity=False
    )
    vllm_memory_fraction: float = knob(
        0.3,
        above=0,
        at_most=1,
        help="share of a device's memory that an engine takes where it shares it (else 0.9)",
        advanced=True,
        identity=False,
    )
    vllm_start_timeout: float = knob(
        900.0, at_least=5, help="seconds an engine may take to start", advanced=True, identity=False
    )
    request_timeout: float = knob(
        600.0, at_least=1, help="seconds one request to an engine may take", advanced=True, identity=False
    )
    concurrency: int = knob(
        64,
        at_least=1,
        at_most=4096,
        help="completions that one engine makes at once",
        advanced=True,
        identity=False,
    )
    sync: Literal["auto", "adapter", "merged"] = knob(
        "auto",
        help="how new weights reach engines; auto: merged on the cpu, adapter on cuda",
        identity=False,
        advanced=True,
    )
    sync_retries: int = knob(
        2, at_least=0, at_most=10, help="times an unproved sync is tried again", advanced=True, identity=False
    )
    eval_samples: int = knob(
        1,
        at_least=0,
        at_most=64,
        help="sampled answers to a held-out row, besides the greedy one",
        advanced=True,
    )
    replay: str | None = knob(
        None,
        help="recorded rollouts to train on without an engine: a run folder, or the file of one step",
        advanced=True,
    )
