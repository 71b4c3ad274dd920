"""What must hold on a GPU, within six minutes and without network: steps, gradients, memory, kill and resume, lack of
memory, and GRPO on recorded rollouts.

    python scripts/gpu_check.py [--device cuda|cpu]

A random model of 0.5 B parameters is made here (a few million on a CPU, where the part that can run is run). Prints one
JSON object; exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config import SftConfig
from finetune.data.batches import Budget, rank_batches
from finetune.knobs import build
from finetune.model.builtin import load_tokenizer
from finetune.model.policy import build_policy
from finetune.model.source import resolve_source
from finetune.records import Example, read_lines
from finetune.train.losses import weighted_nll
from proof.claims import Claim
from proof.product import Run, sft_command
from proof.replaying import replayed

SIZES = {
    "cuda": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
VOCABULARY = {"cuda": 50_000, "cpu": 4_000}
ROW_TOKENS = {"cuda": 900, "cpu": 200}
GRADIENT_LIMIT = 5e-2  # relative, bf16 on the device against fp32 on the CPU
MEMORY_LIMIT = {"cuda": 0.20, "cpu": 0.15}

# Runs a script in 5 GB of address space, which its children inherit.
LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (5_000_000_000,) * 2); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class Bench:
    """Where the checks work: a model, rows, a device."""

    folder: Path
    device: str

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def settings(self, **more: Any) -> dict[str, Any]:
        fixed = {
            "model": self.model,
            "data": self.rows,
            "device": self.device,
            "dtype": "bf16",
            "global_batch_size": 8,
            "eval_fraction": 0,
        }
        return {**fixed, "learning_rate": 1e-3, **more}


def make_bench(folder: Path, device: str) -> Bench:
    """Write a random model with a byte-level tokenizer, and rows of random letters."""
    bench = Bench(folder, device)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY[device], max_position_embeddings=4096, **SIZES[device])
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(bench.model)
    load_tokenizer(resolve_source("builtin:tiny")).save_pretrained(bench.model)
    write_rows(bench.rows, 64, ROW_TOKENS[device])
    return bench


def write_rows(path: Path, count: int, longest: int) -> None:
    draw = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            answer = "".join(draw.choice("abcdefghij ") for _ in range(draw.randint(longest // 2, longest)))
            turns = [{"role": "user", "content": "letters?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def train(bench: Bench, name: str, **more: Any) -> tuple[Run, dict[str, Any]]:
    """Run the product to its end and return the run with the JSON it printed."""
    done = subprocess.run(
        sft_command(bench.folder / name, **bench.settings(**more)),
        capture_output=True,
        text=True,
        check=False,
    )
    return Run(bench.folder / name), {"exit_code": done.returncode, **json.loads(done.stdout)}


def steps_and_speed(bench: Bench) -> list[Claim]:
    """bf16 steps lower the loss; the measured peak is near the forecast."""
    run, answer = train(bench, "steps", max_steps=20)
    if answer["exit_code"]:
        raise RuntimeError(json.dumps(answer["errors"])[:2000])
    losses = [line["loss"] for line in run.metrics]
    speeds = sorted(line["tokens_per_s"] for line in run.metrics[3:])
    plan = json.loads((run.folder / "plan.json").read_text())
    forecast = plan["estimates"]["memory_bytes_per_rank"]
    peak = max(run.manifest["peak_memory_bytes_per_rank"])
    return [
        Claim("loss_of_last_step_over_first", losses[-1] / losses[0], "<", 1.0),
        Claim("tokens_per_s", speeds[len(speeds) // 2], ">", 0),
        Claim("peak_bytes", peak, ">", 0),
        Claim("forecast_error", abs(forecast / peak - 1), "<=", MEMORY_LIMIT[bench.device]),
    ]


def gradients(bench: Bench) -> list[Claim]:
    """bf16 gradients on the device against fp32 gradients on the CPU, of the same rows."""
    draw = random.Random(1)
    rows = []
    for row in range(4):
        ids = [draw.randrange(5, 300) for _ in range(draw.randint(20, 60))]
        rows.append(Example(ids, [0.0] * 10 + [1.0] * (len(ids) - 10), row, "made", row + 1))
    found = []
    for device, dtype in (("cpu", "fp32"), (bench.device, "bf16")):
        values = {
            "model": str(bench.model),
            "data": ["x"],
            "dtype": dtype,
            "attention": "sdpa",
            "gradient_checkpointing": False,
        }
        policy = build_policy(build(SftConfig, values), resolve_source(str(bench.model)))
        with torch.no_grad():
            torch.manual_seed(2)
            for name, parameter in policy.trainable().items():
                if ".lora_B." in name:
                    parameter.normal_(std=0.02)
        policy.to(device)
        (batch,), total = rank_batches(range(4), rows, Budget(4096), 0, 1)
        on_device = batch.to(torch.device(device))
        (weighted_nll(policy(on_device), on_device.weights_N) / total).backward()
        found.append(
            torch.cat(
                [
                    parameter.grad.cpu().flatten()
                    for parameter in policy.trainable().values()
                    if parameter.grad is not None
                ]
            )
        )
    exact, measured = found
    return [
        Claim("gradient_difference", float((measured - exact).norm() / exact.norm()), "<", GRADIENT_LIMIT)
    ]


def kill_and_resume(bench: Bench) -> list[Claim]:
    """kill -9 in the middle; the rerun resumes and each step stands in the metrics once."""
    out = bench.folder / "killed"
    command = sft_command(out, **bench.settings(max_steps=30, checkpoint_every=3))
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_lines(out / "metrics.jsonl")) < 5:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    steps = [line["step"] for line in Run(out).metrics]
    resumed = json.loads(done.stdout)["data"].get("resumed_from") or 0
    return [
        Claim("resumed_from", resumed, ">", 0),
        Claim("steps_once_each", int(steps == list(range(1, 31))), "==", 1),
    ]


def lack_of_memory(bench: Bench) -> list[Claim]:
    """Ask for more than there is: the run fails as out_of_memory with its hint, and no traceback on stdout."""
    if bench.device == "cuda":
        filler = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.985), dtype=torch.uint8, device="cuda")
        _, answer = train(bench, "memory", max_steps=2, micro_batch_tokens=8192)
        del filler
        torch.cuda.empty_cache()
    else:
        write_rows(bench.folder / "many.jsonl", 600, ROW_TOKENS["cpu"])
        wide = {
            "data": bench.folder / "many.jsonl",
            "micro_batch_tokens": 1_000_000,
            "global_batch_size": 600,
        }
        command = sft_command(bench.folder / "memory", **bench.settings(max_steps=1, **wide))
        done = subprocess.run(
            [command[0], "-c", LIMITED, *command[1:]], capture_output=True, text=True, check=False
        )
        answer = {"exit_code": done.returncode, **json.loads(done.stdout)}
    codes = {error["code"] for error in answer["errors"]}
    return [
        Claim("told_as_lack_of_memory", int(bool(codes & {"out_of_memory", "not_enough_memory"})), "==", 1)
    ]


def replayed_grpo(bench: Bench) -> list[Claim]:
    """Rollouts that the CPU sampled and trained on in fp32 teach the same there again, and on the device."""
    return replayed(bench.folder / "replayed", bench.device)


CHECKS = (steps_and_speed, gradients, kill_and_resume, lack_of_memory, replayed_grpo)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    device = parser.parse_args().device
    figures, failed = {}, []
    with tempfile.TemporaryDirectory(prefix="finetune-gpu-") as folder:
        os.environ["FINETUNE_HOME"] = os.environ["FINETUNE_CACHE"] = str(Path(folder) / "home")
        bench = make_bench(Path(folder), device)
        for check in CHECKS:
            started = time.perf_counter()
            for claim in check(bench):
                figures[claim.name] = claim.figure
                failed += (
                    []
                    if claim.holds
                    else [f"{claim.name} {claim.figure} is not {claim.relation} {claim.limit}"]
                )
            print(f"{check.__name__}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(json.dumps({"ok": not failed, "device": device, "figures": figures, "failed": failed}))
    return int(bool(failed))
