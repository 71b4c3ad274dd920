"""grpo on real vLLM servers: what they sample is what the trainer computes, and every version is proved there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.rollout.ledger import RolloutFiles
from tests.train.runs import ROOT, finish, make_prompts_run, metrics

HAS_VLLM = importlib.util.find_spec("vllm") is not None  # importing it would take seconds
pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed in this environment")
REWARDS = Path(__file__).with_name("rewards.py")
PROVED = {"base", "direct", "probe", "digest"}


@pytest.mark.slow
@pytest.mark.proof
def test_adapters_are_served_token_for_token_in_fp32(tmp_path: Path) -> None:
    run = make_prompts_run(
        tmp_path / "run",
        verifier=[f"{REWARDS}:even"],
        engine="vllm",
        num_prompts=24,
        sync="adapter",
        temperature=0.7,
        group_size=8,
        global_batch_size=64,
        max_steps=3,
    )
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    lines = metrics(run)
    assert [line["sync_method"] for line in lines] == ["base", "direct", "direct"]
    assert [line["policy_version"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["logp_gap_mean"] < 1e-5
        assert line["correction_min"] > 1 - 1e-4
        assert line["correction_max"] < 1 + 1e-4  # no token of 64 rollouts is farther off than this
        assert line["ledger"]["trained"] == 64
    batch = RolloutFiles(run / "rollouts").read(3)
    assert batch is not None
    assert {rollout.version for rollout in batch.rollouts} == {"step-000002"}


@pytest.mark.slow
def test_six_steps_on_a_real_model_by_the_command(tmp_path: Path) -> None:
    flags = (
        "--method grpo --model builtin:smollm2-135m --data builtin:arithmetic --max-steps 6 --eval-rows 20"
        " --eval-samples 1 --max-completion-tokens 16 --learning-rate 1e-4 --vllm-args enforce-eager"
    ).split()
    command = [
        sys.executable,
        str(ROOT / "scripts" / "run_finetune_local.py"),
        *flags,
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["status"]) == (0, "succeeded"), answer
    result = answer["data"]["result"]
    assert result["steps"] == 6
    assert result["eval_before"]["num_rows"] == result["lift"]["num_pairs"] == 20
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    syncs = [event for event in events if event["kind"] == "sync"]
    assert len(syncs) >= 2
    assert all(event["sync_method"] in PROVED for event in syncs)
    for line in lines:
        assert line["ledger"]["sampled"] == 64
        assert line["rollouts_lost"] == 0
        if not line.get("skipped"):
            assert line["logp_gap_mean"] < 0.2
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
