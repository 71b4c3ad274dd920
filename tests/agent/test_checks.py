"""The list of checks of a plan: what is looked at, and that each tells of the fault that it is about."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.checks import checks_after, has_free_ports
from agent.preflight import Findings
from agent.system import Machine
from finetune.errors import FinetuneError
from tests.agent.calls import CPU, CUDA, GPUS

Maker = Callable[..., tuple[dict[str, Any], Findings]]
EVERY_PLAN = "devices memory bf16 disk shared_memory model tokenizer template profile".split()


def told(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in plan["checks"]}


def test_a_sound_plan_passes_every_check(planned: Maker, grpo: Maker) -> None:
    plan, found = planned()
    assert not found.problems
    assert list(told(plan)) == EVERY_PLAN
    assert all(check["ok"] for check in plan["checks"])
    checks = told(grpo()[0])
    assert checks.keys() == {*EVERY_PLAN, "verifier", "engine", "ports", "adapter_rank"}
    assert all(check["ok"] for check in checks.values())


@pytest.mark.parametrize(
    ("machine", "flags", "name", "words"),
    [
        (replace(CPU, missing="hidden", signs=("x",)), {}, "devices", "hidden from this process"),
        (replace(CUDA, devices=GPUS[:1]), {"num_gpus": "2"}, "devices", "1 visible"),
        (replace(CPU, free_memory_bytes=1000), {}, "memory", "of 0.0 GiB free"),
        (replace(CPU, cpu_bf16=False), {"dtype": "bf16"}, "bf16", "no bf16 instructions"),
        (CPU, {"model": "/gone"}, "model", "gone"),
        (CPU, {"chat_template": "gone.jinja"}, "template", "gone.jinja"),
        (CPU, {"profile": "gone.yaml"}, "profile", "gone.yaml"),
    ],
)
def test_a_fault_shows_in_the_check_that_it_is_about(
    planned: Maker,
    machine: Machine,
    flags: dict[str, str],
    name: str,
    words: str,
) -> None:
    plan, _ = planned(machine, **flags)
    check = told(plan)[name]
    assert not check["ok"]
    assert words in check["text"]
    others = [one["name"] for one in plan["checks"] if not one["ok"]]
    assert others == [name] or name == "model"  # without a model its tokenizer is not known either


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        ({"verifier": ["gone.py:score"]}, "verifier", "gone.py"),
        ({"vllm_python": "/nowhere/python"}, "engine", "no program"),
        ({"sync": "adapter", "lora_rank": "600"}, "adapter_rank", "600"),
    ],
)
def test_a_fault_of_grpo_shows_in_its_check(
    grpo: Maker, flags: dict[str, Any], name: str, words: str
) -> None:
    check = told(grpo(**flags)[0])[name]
    assert not check["ok"]
    assert words in check["text"]


def test_how_an_adapter_is_served(grpo: Maker) -> None:
    assert "no rank" in told(grpo()[0])["adapter_rank"]["text"]  # merged weights
    served = told(grpo(sync="adapter", lora_rank="24")[0])["adapter_rank"]
    assert served["text"] == "rank 24, served with --max-lora-rank 32"
    assert "all weights" in told(grpo(tuning="full")[0])["adapter_rank"]["text"]


def test_shared_memory_must_hold_the_versions_of_the_weights(grpo: Maker, planned: Maker) -> None:
    small = replace(CPU, shared_memory=(64 << 20, 100_000))
    plan, found = grpo(small)
    assert not told(plan)["shared_memory"]["ok"]
    assert "low_shared_memory" in [code for code, _ in found.warnings]
    assert not found.problems
    assert "low_shared_memory" in [code for code, _ in grpo(replace(CPU, shared_memory=None))[1].warnings]
    assert "low_shared_memory" not in [code for code, _ in planned(small)[1].warnings]
    ranks = replace(CUDA, shared_memory=(64 << 20, 64 << 20))
    assert "low_shared_memory" in [code for code, _ in planned(ranks, num_gpus="2")[1].warnings]


def test_bf16_without_instructions_is_warned_of_where_it_was_asked_for(planned: Maker) -> None:
    slow = replace(CPU, cpu_bf16=False)
    assert "slow_dtype" in [code for code, _ in planned(slow, dtype="bf16")[1].warnings]
    assert "slow_dtype" not in [code for code, _ in planned(slow)[1].warnings]


def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_loaded(
    planned: Maker,
    tmp_path: Path,
) -> None:
    from finetune.model.builtin import write_model
    from finetune.model.source import resolve_source

    write_model(resolve_source("builtin:tiny"), tmp_path / "model")
    whole = told(planned(model=str(tmp_path / "model"))[0])["tokenizer"]
    assert (whole["ok"], whole["text"]) == (True, "files tokenizer.json")
    (tmp_path / "model" / "tokenizer.json").unlink()
    plan, found = planned(model=str(tmp_path / "model"))
    assert [error.code for error in found.problems] == ["unsupported_model"]
    assert not told(plan)["tokenizer"]["ok"]


def test_ports_are_free_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_free_ports(3)

    monkeypatch.setattr("agent.checks.socket.socket", Taken)
    assert not has_free_ports(1)


class Taken:
    """A socket that gets no port."""

    def bind(self, address: tuple[str, int]) -> None:
        raise OSError("Cannot assign requested address")

    def close(self) -> None:
        """Nothing was opened."""


def test_the_full_checks_tell_what_they_saw_or_found_wrong(grpo: Maker) -> None:
    plan, _ = grpo()
    scores = {"numeric": {"right": 1.0, "wrong": 0.0, "empty": 0.0, "malformed": None}}
    answer = {"report": {"stop_token_ids": [4], "selfcheck": "ok"}, "verifiers": scores}
    checks = {check["name"]: check for check in checks_after(plan, Findings(), answer)}
    assert checks["verifier"]["text"] == "numeric: right 1.0, wrong 0.0, empty 0.0, malformed None"
    assert "exact token ids" in checks["template"]["text"]
    assert "4 ends an answer" in checks["tokenizer"]["text"]
    blind = Findings([FinetuneError("blind_verifier", "it sees nothing")])
    checks = {check["name"]: check for check in checks_after(plan, blind, None)}
    assert (checks["verifier"]["ok"], checks["verifier"]["text"]) == (False, "it sees nothing")
