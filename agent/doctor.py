"""The verb doctor: what this machine offers and what is broken, each as a finding with its fix.

Rule: torch and all that brings it are imported in a child process alone, and nothing outside this machine is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from agent import symptoms
from agent.environment import is_secret_name
from agent.plan import home
from agent.preflight import GIB, Findings, choose_device
from agent.render import Answer, refusal
from agent.runner import Context
from agent.symptoms import Finding
from agent.system import (
    SOURCE_ROOT,
    driver_cuda,
    free_disk,
    package_versions,
    source_state,
    torch_toolkit,
    vllm_packages,
)
from agent.trial import Imports, try_imports
from finetune.errors import EXIT_CODES, FinetuneError

IMPORTS = ("torch", "transformers", "peft", "tokenizers", "datasets", "safetensors")


def doctor(context: Context, quick: bool = False) -> Answer:
    """Look at everything and say what is wrong. quick: import nothing, which takes a second instead of many."""
    machine, engine = context.machine, vllm_packages()
    imports = None if quick else try_imports((*IMPORTS, *(("vllm",) if engine else ())), machine.environ)
    device = choose_device("auto", machine, Findings())
    findings = [
        *_installed(imports),
        *_hardware(context, imports),
        symptoms.memory(machine.memory_bytes, machine.free_memory_bytes),
        symptoms.shared_memory(machine.shared_memory),
        symptoms.disk(_free_disk(context)),
        symptoms.network(machine.environ),
        symptoms.engine(engine, device, imports),
        symptoms.sandbox(),
        symptoms.containers(machine.environ),
        symptoms.cluster(machine.environ),
    ]
    return _answer(context, device, findings, imports)


def _installed(imports: Imports | None) -> list[Finding]:
    declared = symptoms.declared_requirements()
    found = [
        symptoms.python(sys.version_info[:3], declared.python, sys.platform),
        symptoms.packages(declared.packages, symptoms.installed_version),
        symptoms.torch_partners(symptoms.installed_version, symptoms.requirements_of),
    ]
    # A package that is missing is told as missing, not as one that does not import.
    if imports is None or any(one.code == "missing_package" for one in found):
        return found
    return [*found, symptoms.imports(imports, IMPORTS)]


def _hardware(context: Context, imports: Imports | None) -> list[Finding]:
    machine = context.machine
    found = [symptoms.devices(machine), symptoms.driver(torch_toolkit(), driver_cuda())]
    if imports is not None and imports.devices:
        found += [symptoms.architectures(imports), symptoms.topology(imports)]
    return found


def _free_disk(context: Context) -> dict[str, int]:
    """Return the free bytes at the working directory and at the cache."""
    places = (context.cwd, symptoms.cache_folder(context.machine.environ))
    return {str(place): free_disk(place) for place in places}


def _answer(context: Context, device: str, findings: Sequence[Finding], imports: Imports | None) -> Answer:
    problems = [
        FinetuneError(one.code, one.text, finding=one.name, **one.evidence)
        for one in findings
        if not one.ok and one.code in EXIT_CODES
    ]
    warnings = [
        (str(one.code), one.text)
        for one in findings
        if not one.ok and one.code and one.code not in EXIT_CODES
    ]
    data = _data(context, device, imports) | {
        "findings": [
            {"name": one.name, "ok": one.ok, "text": one.text, "fix": None if one.ok else one.fix}
            for one in findings
        ]
    }
    if problems:
        return refusal("doctor", problems, data=data, warnings=warnings)
    machine = context.machine
    what = (
        f"{len(machine.devices)} accelerators"
        if machine.devices
        else f"{machine.cores} cores, {machine.free_memory_bytes / GIB:.1f} GiB free"
    )
    odd = [one.name for one in findings if not one.ok]
    more = f"; look at {', '.join(odd)} under findings" if odd else ""
    return Answer(
        "doctor", "healthy", f"ready to train on {device}: {what}{more}", data=data, warnings=warnings
    )


def _data(context: Context, device: str, imports: Imports | None) -> dict[str, Any]:
    machine, engine = context.machine, vllm_packages()
    return {
        "device": device,
        "devices": [
            {"id": item.id, "name": item.name, "memory_bytes": item.memory_bytes} for item in machine.devices
        ],
        "signs_of_devices": list(machine.signs),
        "cores": machine.cores,
        "cpu_bf16": machine.cpu_bf16,
        "memory_bytes": machine.memory_bytes,
        "free_memory_bytes": machine.free_memory_bytes,
        "free_disk_bytes": free_disk(context.cwd),
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "imports": "not tried" if imports is None else f"tried in {imports.seconds:.1f} s",
        "engine": " and ".join(f"{name} {version}" for name, version in engine.items()) or None,
        "source": {"root": str(SOURCE_ROOT), **source_state()},
        "home": str(home(machine.environ)),
        "secrets_present": sorted(name for name in machine.environ if is_secret_name(name)),
    }
