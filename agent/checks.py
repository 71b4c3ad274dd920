"""The checks of a plan as a list: what was looked at, whether it is well, and in one sentence what was found.

Rule: a check repeats what the findings say, in the user's words; it decides nothing and refuses nothing itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.engines import has_own_servers
from agent.estimates import Scene
from agent.preflight import GIB, Findings, shared_memory_needed, tokenizer_files
from finetune.config import GrpoConfig, RunConfig
from finetune.errors import FinetuneError
from finetune.model.source import Source
from finetune.rules import LORA_RANKS, served_lora_rank

# What a check is about: codes of problems, and settings that a problem names.
_ABOUT: dict[str, tuple[set[str], set[str]]] = {
    "devices": ({"no_device", "device_hidden", "not_enough_devices"}, {"device", "num_gpus"}),
    "memory": ({"not_enough_memory"}, set()),
    "disk": ({"not_enough_disk"}, set()),
    "model": (
        {"model_missing", "unsafe_model", "unsupported_model", "access_denied", "offline"},
        {"model", "revision"},
    ),
    "tokenizer": ({"tokens_past_embedding"}, set()),
    "template": (
        {"no_chat_template", "bad_template", "template_not_prefix_stable", "no_stop_token"},
        {"chat_template", "chat_template_args"},
    ),
    "verifier": ({"bad_verifier", "blind_verifier", "no_sandbox"}, {"verifier", "verifier_args"}),
    "adapter_rank": (set(), {"lora_rank"}),
    "engine": ({"engine_missing"}, {"engine", "vllm_url", "rollout_gpus", "rollout_tp"}),
    "profile": ({"bad_profile"}, {"profile"}),
}


@dataclass(frozen=True)
class _Look:
    """What the sentences are made of."""

    plan: Mapping[str, Any]
    scene: Scene
    source: Source | None
    found: Findings

    @property
    def config(self) -> RunConfig:
        return self.scene.config


def checks_of(
    plan: Mapping[str, Any], scene: Scene, source: Source | None, found: Findings
) -> list[dict[str, Any]]:
    """Return every check of a quick plan as {"name", "ok", "text"}."""
    return [
        _judged({"name": name, "ok": ok, "text": text}, found)
        for name, ok, text in _looked_at(_Look(plan, scene, source, found))
    ]


def checks_after(
    plan: Mapping[str, Any], found: Findings, answer: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the checks of a plan after the full ones. answer: of the child that did them, None where it found problems."""
    ok, memory = _memory(plan["estimates"])
    told = {"memory": memory} | (_told(answer) if answer else {})
    return [
        _judged(
            check
            | {"text": told.get(check["name"], check["text"])}
            | ({"ok": ok} if check["name"] == "memory" else {}),
            found,
        )
        for check in plan.get("checks", [])
    ]


def _told(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return what the full checks say of a check by its name."""
    report = answer["report"]
    stops = ", ".join(map(str, report.get("stop_token_ids") or []))
    told = {
        "tokenizer": f"loaded; all its tokens have a row in the embedding, {stops or 'nothing'} ends an answer"
    }
    if report.get("selfcheck") == "ok":
        told["template"] = "renders the rows; answers are found in them by exact token ids"
    if answer.get("verifiers"):
        told["verifier"] = "; ".join(
            f"{name}: " + ", ".join(f"{kind} {score}" for kind, score in scores.items())
            for name, scores in answer["verifiers"].items()
        )
    return told


def _judged(check: dict[str, Any], found: Findings) -> dict[str, Any]:
    """Return a check with the problem that is about it, where there is one."""
    fault = _fault(check["name"], found)
    return check | ({"ok": False, "text": fault.message} if fault else {})


def _fault(name: str, found: Findings) -> FinetuneError | None:
    codes, settings = _ABOUT.get(name, (set(), set()))
    for error in found.problems:
        if error.code in codes or error.evidence.get("setting") in settings:
            return error
    return None


def _looked_at(look: _Look) -> Iterator[tuple[str, bool, str]]:
    config = look.config
    yield "devices", True, _devices(look)
    yield "memory", *_memory(look.plan["estimates"])
    yield "bf16", *_bf16(config, look.scene)
    yield "disk", *_disk(look)
    yield "shared_memory", *_shared_memory(look)
    yield "model", look.source is not None, _model(look.plan["model"])
    yield "tokenizer", *_tokenizer(look.source)
    yield "template", True, _template(config, look.source)
    if isinstance(config, GrpoConfig):
        yield "verifier", True, _verifier(config)
        if config.tasks:
            yield "agents", True, _agents(config)
        yield "engine", True, _engine(config, look.plan)
        yield "ports", *_ports(config, look.plan)
        yield "adapter_rank", *_adapter_rank(config)
    fingerprint = look.plan["parallel"]["profile"]
    yield "profile", True, f"fingerprint {fingerprint[:12]}" if fingerprint else "none given"


def _verifier(config: GrpoConfig) -> str:
    if config.tasks:
        return "the tasks' own; `finetune tasks check` tells whether they can be trusted"
    return f"{', '.join(config.verifier)}: told right from wrong answers by --checks full"


def _agents(config: GrpoConfig) -> str:
    box = config.box if config.box != "process" else "process, which isolates nothing"
    return f"harness {config.harness}, {config.agents} at once, in box {box}; opened by --checks full"


def _devices(look: _Look) -> str:
    parallel = look.plan["parallel"]
    if parallel["device"] == "cpu":
        return f"{parallel['num_gpus']} rank(s) on the cpu, which has {look.scene.machine.cores} cores"
    names = ", ".join(f"{item['id']} ({item['name']})" for item in parallel["devices"])
    served = sorted({name for engine in parallel["engines"] for name in engine["devices"]})
    return f"ranks on {names}" + (f"; engines on {', '.join(served)}" if served else "")


def _memory(estimates: Mapping[str, Any]) -> tuple[bool, str]:
    verdicts = estimates.get("verdicts") or []
    if not verdicts:
        return True, "not known before the model's sizes are"
    texts = []
    for one in verdicts:
        free = "unknown" if one["free_bytes"] is None else f"{one['free_bytes'] / GIB:.1f} GiB"
        texts.append(f"{one['device']}: about {one['needed_bytes'] / GIB:.2f} GiB of {free} free")
    return all(one["fits"] for one in verdicts), "; ".join(texts)


def _bf16(config: RunConfig, scene: Scene) -> tuple[bool, str]:
    has = scene.machine.cpu_bf16 if config.device == "cpu" else all(one.has_bf16 for one in scene.devices)
    where = "this cpu" if config.device == "cpu" else "the devices"
    what = "has" if config.device == "cpu" else "have"
    text = f"computes in {config.dtype}; {where} {what} {'' if has else 'no '}bf16 instructions"
    return has or config.dtype != "bf16", text


def _disk(look: _Look) -> tuple[bool, str]:
    needed, free = (look.plan["estimates"].get(name) for name in ("disk_bytes", "free_disk_bytes"))
    if needed is None or free is None:
        return True, "not known before the model's sizes are"
    is_low = any(code == "low_disk" for code, _ in look.found.warnings)
    return not is_low, f"about {needed / GIB:.2f} GiB of {free / GIB:.1f} GiB free"


def _shared_memory(look: _Look) -> tuple[bool, str]:
    needed, room = shared_memory_needed(look.plan["model"], look.config), look.scene.machine.shared_memory
    if not needed:
        return True, "nothing of it is needed"
    if room is None:
        return False, f"there is no /dev/shm; {needed / GIB:.2f} GiB go to the folder for temporary files"
    return room[1] > needed, f"{needed / GIB:.2f} GiB of {room[1] / GIB:.2f} GiB free in /dev/shm"


def _model(model: Mapping[str, Any]) -> str:
    parameters = model.get("parameters")
    return (
        f"{model['id']}: {parameters:,} parameters"
        if parameters
        else f"{model['id']}: its weights are not here"
    )


def _tokenizer(source: Source | None) -> tuple[bool, str]:
    if source is None:
        return False, "not known without the model"
    if source.kind != "folder" or source.folder is None:
        return True, f"that of {source.id}"
    if files := tokenizer_files(source):
        return True, f"files {', '.join(files)}"
    return False, f"{source.folder} has no file of a tokenizer"


def _template(config: RunConfig, source: Source | None) -> str:
    if config.chat_template:
        return f"{config.chat_template}, instead of the model's own"
    if source is not None and (source.tokenizer_config or {}).get("chat_template"):
        return "the model's own; tried on the rows by --checks full"
    return "the model has none: rows of text need none, conversations need --chat-template"


def _engine(config: GrpoConfig, plan: Mapping[str, Any]) -> str:
    if config.replay:
        return "none: recorded rollouts"
    count = len(plan["parallel"]["engines"])
    return "transformers in the trainer's process" if config.engine == "local" else f"{count} x vllm"


def _ports(config: GrpoConfig, plan: Mapping[str, Any]) -> tuple[bool, str]:
    if config.vllm_url:
        return True, f"those of {', '.join(config.vllm_url)}"
    if not has_own_servers(config):
        return True, "none needed"
    count = len(plan["parallel"]["engines"])
    return has_free_ports(count), f"{count} free port(s) of 127.0.0.1, chosen when the engines start"


def has_free_ports(count: int) -> bool:
    """Whether so many ports of the loopback interface can be had at once."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return True
    except OSError:
        return False
    finally:
        for probe in probes:
            probe.close()


def _adapter_rank(config: GrpoConfig) -> tuple[bool, str]:
    if config.tuning == "full":
        return True, "no adapter: all weights are trained"
    if config.sync != "adapter":
        return True, f"rank {config.lora_rank}; merged weights are served, which have no rank"
    if config.lora_rank > LORA_RANKS[-1]:
        return False, f"rank {config.lora_rank}; vLLM serves up to {LORA_RANKS[-1]}"
    return True, f"rank {config.lora_rank}, served with --max-lora-rank {served_lora_rank(config.lora_rank)}"
