"""What can be told before anything is paid for: the quick checks, which read files and ask the machine, without torch.

Checks report; they never stop at the first problem and never change a setting.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.environment import scrub_text, secret_values
from agent.folder import RunFolder
from agent.system import Device, Machine, free_disk
from finetune.config import GrpoConfig, RunConfig
from finetune.data.arguments import TEMPLATE_NAMES, column_names, template_arguments
from finetune.data.rows import data_digest, eval_sources
from finetune.errors import FinetuneError, Problems
from finetune.model.source import (
    ModelFacts,
    Source,
    model_digest,
    model_facts,
    resolve_source,
    target_problems,
)

Note = tuple[str, str]  # code of a warning, text
GIB = 2**30
_DISK_RESERVE = 1 * GIB
_KEPT = ("checkpoints", "adapter", "rollouts")  # of a run folder: what the estimate of the disk is made of
_VERSIONS = 3  # of the weights that lie in shared memory: what is served, what comes next, and one to spare
_LONGEST_NAME = 255  # bytes, on the file systems that people have
_HIDDEN = "there is an accelerator here ({signs}), but it is hidden from this process"
_WHY_MISSING = {
    "hidden": ("device_hidden", _HIDDEN + " (sandbox, container or CUDA_VISIBLE_DEVICES)"),
    "broken": (
        "no_device",
        "an accelerator should be here ({signs}), but no driver reports one; mend the driver, or give --device cpu",
    ),
    "no_torch_build": (
        "no_device",
        "an accelerator is visible ({signs}), but the installed torch is a CPU build; install one for it, or give --device cpu",
    ),
}


@dataclass
class Findings:
    """What checks found."""

    problems: list[FinetuneError] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)

    def add(self, error: FinetuneError | Problems) -> None:
        self.problems += error.errors if isinstance(error, Problems) else [error]

    def warn(self, code: str, text: str) -> None:
        self.warnings.append((code, text))


@dataclass(frozen=True)
class ModelFound:
    """A model as the plan knows it."""

    source: Source
    digest: str
    facts: ModelFacts
    all_bytes: bool  # whether the digest is of all bytes of the weights


def choose_device(asked: str, machine: Machine, found: Findings) -> str:
    """Return cuda or cpu; on a problem what the rest of the plan can go on with."""
    if asked == "cpu":
        return "cpu"
    if machine.devices:
        return "cuda"
    signs = ", ".join(machine.signs)
    if machine.missing:
        code, text = _WHY_MISSING[machine.missing]
        found.add(
            FinetuneError(
                code, f"device: {text.format(signs=signs)}", setting="device", signs=list(machine.signs)
            )
        )
    elif asked == "cuda":
        found.add(
            FinetuneError(
                "no_device", "device: no accelerator is here; give --device cpu", setting="device", signs=[]
            )
        )
    else:
        found.warn("cpu_training", f"no accelerator is here: training on the CPU ({machine.cores} cores)")
    return "cpu"


def devices_of_ranks(device: str, num_gpus: int, machine: Machine, found: Findings) -> list[Device]:
    """Return the devices that the ranks get, the first visible ones in their order; none on the cpu."""
    if device == "cpu":
        if num_gpus > machine.cores:
            found.warn(
                "oversubscribed", f"{num_gpus} ranks share {machine.cores} cores: they wait for each other"
            )
        return []
    if num_gpus > len(machine.devices):
        text = f"num_gpus: {num_gpus} asked for, {len(machine.devices)} visible; lower --num-gpus"
        found.add(
            FinetuneError(
                "not_enough_devices", text, setting="num_gpus", asked=num_gpus, visible=len(machine.devices)
            )
        )
    return list(machine.devices[:num_gpus])


def find_model(config: RunConfig, verify: bool, found: Findings) -> ModelFound | None:
    try:
        source = resolve_source(config.model, config.revision, config.trust_remote_code, download=False)
        model = ModelFound(source, model_digest(source, verify), model_facts(source), verify)
    except (FinetuneError, Problems) as error:
        found.add(error)
        return None
    if config.trust_remote_code and source.config.get("auto_map"):
        found.warn(
            "remote_code", f"model {config.model} runs its own Python code, as --trust-remote-code allows"
        )
    if source.kind == "folder" and not tokenizer_files(source):
        text = f"model {config.model}: {source.folder} has no file of a tokenizer; copy tokenizer.json beside the weights"
        found.add(FinetuneError("unsupported_model", text, setting="model"))
    if config.tuning == "lora" and not config.init_adapter:
        found.problems += target_problems(source, config.lora_targets)
    if config.max_length and config.max_length > model.facts.context:
        text = f"max_length: {config.max_length} is more than the model's context of {model.facts.context} tokens"
        found.add(FinetuneError("bad_value", text, setting="max_length", context=model.facts.context))
    return model


def find_data(sources: list[str], found: Findings) -> list[dict[str, Any]]:
    """Return path, sha256, bytes, rows and weight of each data file."""
    try:
        files = data_digest(sources)
    except (FinetuneError, Problems) as error:
        found.add(error)
        return []
    for file in files:
        if file["rows"] == 0:
            found.add(FinetuneError("no_rows", f"{file['path']}: holds no rows", file=file["path"]))
    return files


def held_out_sources(config: RunConfig) -> list[str]:
    return config.eval_data or eval_sources(config.data)


def missing_files(config: RunConfig) -> Iterator[FinetuneError]:
    """Yield the names that settings give and that are neither known nor files; data, model and adapter have own checks."""
    known = {"chat_template": TEMPLATE_NAMES, "domain": ("auto", "text", "math")}
    for name, names in known.items():
        file = getattr(config, name)
        if file and file not in names and not os.path.isfile(file):
            text = f"{name}: {file} is no file, and there is {', '.join(names)} besides files"
            yield FinetuneError("file_missing", text, setting=name, file=file)


def check_written(config: RunConfig, found: Findings) -> None:
    """Check the settings that are written as name=value, and that the packages which settings name are installed."""
    for check, value in ((template_arguments, config.chat_template_args), (column_names, config.map)):
        try:
            check(value)
        except FinetuneError as error:
            found.add(error)
    if config.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        text = "attention flash_attention_2: the package flash_attn is not installed; leave --attention out"
        found.add(FinetuneError("missing_package", text, setting="attention", package="flash_attn"))
    if config.report_to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        text = "report_to tensorboard: the package tensorboard is not installed; pip install 'finetune-skills[report]'"
        found.add(FinetuneError("missing_package", text, setting="report_to", package="tensorboard"))


def stored_secrets(settings: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[FinetuneError]:
    """Yield the settings that hold the value of a secret: settings are written to disk, so a secret has no place there."""
    names = {value: name for name, value in environ.items()}
    for setting, value in settings.items():
        text = str(value)
        held = [f"the value of {names[secret]}" for secret in secret_values(environ) if secret in text]
        # What is masked in the plan's file is what training reads from there.
        if not held and scrub_text(text, []) != text:
            held = ["what looks like a token, or like a password in a URL"]
        for what in held:
            problem = f"{setting}: holds {what}; settings are stored, secrets are not"
            yield FinetuneError("bad_value", problem, setting=setting)


def check_disk(out: Path, needed: int, found: Findings) -> int:
    """Check that the checkpoints will fit; return the free bytes. What a run that goes on has written is there already."""
    free = free_disk(out)
    needed = max(0, needed - sum(RunFolder(out / name).num_bytes() for name in _KEPT))
    text = f"out: {out} has {free / GIB:.1f} GiB free, the checkpoints take {needed / GIB:.1f} GiB"
    if needed > free:
        found.add(FinetuneError("not_enough_disk", text, needed_bytes=needed, free_bytes=free))
    elif needed + _DISK_RESERVE > free:
        found.warn("low_disk", text)
    return free


def check_writable(out: Path, found: Findings) -> None:
    """Check that the run folder is there or could be made, without making it."""
    if any(len(part.encode()) > _LONGEST_NAME for part in out.parts):
        text = f"out: a name in it is longer than {_LONGEST_NAME} bytes"
        found.add(FinetuneError("bad_path", text, setting="out"))
        return
    parent = out
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        found.add(
            FinetuneError(
                "bad_value",
                f"out: {out} cannot be made: {parent} is no folder that can be written",
                setting="out",
            )
        )


def check_memory(verdicts: list[dict[str, Any]], is_exact: bool, found: Findings) -> None:
    """Compare what each device must hold with what is free on it; a forecast that is not exact warns and refuses nothing."""
    for verdict in verdicts:
        needed, free = verdict["needed_bytes"], verdict["free_bytes"]
        if free is None:
            continue
        text = (
            f"memory: {verdict['device']} must hold about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free;"
            " a lower --micro-batch-tokens or --max-length takes less"
        )
        if needed > free and is_exact:
            found.add(FinetuneError("not_enough_memory", text, needed_bytes=needed, available_bytes=free))
        elif needed > (0.85 if is_exact else 1.0) * free:
            found.warn("low_memory", text)


def check_shared_memory(
    model: Mapping[str, Any], config: RunConfig, machine: Machine, found: Findings
) -> None:
    """Warn where /dev/shm does not hold what ranks or engines hand to each other."""
    needed = shared_memory_needed(model, config)
    free = machine.shared_memory[1] if machine.shared_memory else 0
    if needed and needed >= free:
        text = f"/dev/shm has {free / GIB:.2f} GiB free, {needed / GIB:.2f} GiB are handed on there"
        found.warn("low_shared_memory", text)


def shared_memory_needed(model: Mapping[str, Any], config: RunConfig) -> int:
    """Return the bytes in /dev/shm of versions of the weights on their way to engines, or of collectives on devices."""
    if isinstance(config, GrpoConfig) and config.engine == "vllm" and not config.replay:
        width = 2 if config.dtype == "bf16" else 4
        return _VERSIONS * width * int(model.get("parameters") or 0)
    return GIB if config.device == "cuda" and config.num_gpus > 1 else 0


def check_dtype(config: RunConfig, devices: list[Device], machine: Machine, found: Findings) -> None:
    """Warn where bf16 is computed without instructions for it."""
    has = machine.cpu_bf16 if config.device == "cpu" else all(item.has_bf16 for item in devices)
    if config.dtype == "bf16" and not has:
        where = "this CPU" if config.device == "cpu" else "a chosen device"
        text = f"dtype: {where} has no instructions for bf16 and imitates it slowly; leave --dtype out"
        found.warn("slow_dtype", text)


def tokenizer_files(source: Source) -> list[str]:
    """Return the files of a model's folder from which a tokenizer can be made."""
    assert source.folder is not None, "builtins have none"
    kinds = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
    return sorted({path.name for kind in kinds for path in source.folder.glob(kind)})
