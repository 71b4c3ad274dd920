"""Run folders made by hand, so that the engine is tested by what it leaves on disk and without the surface around it."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from finetune.data.prepare import Prepared, store_prepared
from finetune.knobs import build
from finetune.methods import METHODS
from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rank import run_rank
from finetune.records import Example, Ledger, Row, StopFlag, TrainResult, read_lines

TINY = "builtin:tiny"
VOCABULARY = 300
ROOT = Path(__file__).parents[2]
REWARDS = Path(__file__).with_name("rewards.py")


def ragged_examples(num_rows: int, seed: int = 0, longest: int = 60) -> list[Example]:
    """Random token ids, 5 to `longest` of them, the last third to two thirds learned."""
    draw = random.Random(seed)
    examples = []
    for row in range(num_rows):
        length = draw.randint(5, longest)
        prompt = draw.randint(length // 3, 2 * length // 3)
        ids = [draw.randrange(5, VOCABULARY) for _ in range(length)]
        examples.append(Example(ids, [0.0] * prompt + [1.0] * (length - prompt), row, "made.jsonl", row + 1))
    return examples


def make_run(
    folder: Path,
    train: list[Example],
    held_out: list[Example] = [],  # noqa: B006
    method: str = "sft",
    **settings: Any,
) -> Path:
    """Write plan.json and prepared data for a run of builtin:tiny in fp32; `settings` come on top."""
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {
        "dtype": "fp32",
        "device": "cpu",
        "parallel": "ddp",
        "gradient_checkpointing": False,
        "attention": "sdpa",
        "threads": 1,
    }
    values = {
        "model": TINY,
        "data": ["made.jsonl"],
        "eval_fraction": 0.0,
        "lora_rank": 8,
        **fixed,
        **settings,
    }
    config = build(METHODS[method].config, values)
    prepared = folder / "prepared"
    rows = [Row({}, "made.jsonl", place + 1) for place in range(len(held_out))]
    ledger = Ledger(read=len(train) + len(held_out), trained=len(train), held_out=len(held_out))
    store_prepared(Prepared(train, held_out, rows, ledger, {}, []), prepared)
    plan = {
        "method": method,
        "settings": {name: {"value": value, "source": "user"} for name, value in vars(config).items()},
        "prepared": str(prepared),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def make_prompts_run(
    folder: Path, num_prompts: int = 12, num_eval: int = 0, num_texts: int | None = None, **settings: Any
) -> Path:
    """Write plan.json and prompts of random ids for a grpo run of builtin:tiny in fp32 that samples in its own process.

    num_texts: how many of the prompts differ; the others repeat them.
    """
    draw = random.Random(7)

    def side(count: int) -> tuple[list[Example], list[Row]]:
        ids = [[draw.randrange(5, VOCABULARY) for _ in range(draw.randint(4, 12))] for _ in range(count)]
        ids = [ids[place % (num_texts or count)] for place in range(count)]
        examples = [
            Example(one, [0.0] * len(one), place, "p.jsonl", place + 1) for place, one in enumerate(ids)
        ]
        return examples, [Row({"answer": str(place)}, "p.jsonl", place + 1) for place in range(count)]

    (train, rows), (held_out, eval_rows) = side(num_prompts), side(num_eval)
    values = {
        "engine": "local",
        "group_size": 4,
        "global_batch_size": 16,
        "max_completion_tokens": 6,
        "max_length": 64,
        "max_steps": 4,
        "learning_rate": 1e-3,
    }
    make_run(folder, train, method="grpo", **{**values, **settings})
    plan = json.loads((folder / "plan.json").read_text())
    engines = (
        [{"index": 0, "devices": [], "url": None}] if plan["settings"]["engine"]["value"] == "vllm" else []
    )
    (folder / "plan.json").write_text(json.dumps(plan | {"parallel": {"engines": engines, "devices": []}}))
    report = {"stop_token_ids": [3]}
    ledger = Ledger(read=num_prompts + num_eval, trained=num_prompts, held_out=num_eval)
    shutil.rmtree(folder / "prepared")
    store_prepared(Prepared(train, held_out, eval_rows, ledger, report, [], rows), folder / "prepared")
    return folder


def make_scored_run(folder: Path, verifier: str = "even", **settings: Any) -> Path:
    """As make_prompts_run, scored by a verifier of tests/train/rewards.py."""
    return make_prompts_run(folder, verifier=[f"{REWARDS}:{verifier}"], **settings)


def train_here(run: Path) -> TrainResult:
    """Train in this process, with one thread."""
    torch.set_num_threads(1)
    return run_rank(run, 0, 1, None, StopFlag())


def start(run: Path, *launcher: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, *(launcher or ("-m", "finetune.launch")), str(run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(run: Path, *launcher: str) -> dict[str, Any]:
    """Run to the end and return outcome.json, with the exit code."""
    process = start(run, *launcher)
    output, _ = process.communicate(timeout=600)
    outcome = json.loads((run / "outcome.json").read_text()) if (run / "outcome.json").exists() else {}
    return outcome | {"exit_code": process.returncode, "output": output.decode()}


def finish_on_ranks(runs: list[Path], size: int = 2) -> None:
    """Train several runs one after the other in the same `size` processes: what they import is read once."""
    program = "from tests.train.runs import train_in_turn; train_in_turn()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", program, str(size), *map(str, runs)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=600)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, said


def train_in_turn() -> None:
    """Be one rank of each run that the command names."""
    size, *runs, rank = sys.argv[1:]
    for run in map(Path, runs):
        store = torch.distributed.FileStore(str(run / "meeting"), int(size))
        run_rank(run, int(rank), int(size), store, StopFlag())


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "metrics.jsonl")


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def adapter_digest(run: Path) -> str:
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def first_gradient(run: Path) -> dict[str, torch.Tensor]:
    """AdamW's first moment after one step is a tenth of the gradient."""
    state = load_file(run / "checkpoints" / "step-1" / "optimizer.safetensors")
    return {name: tensor * 10 for name, tensor in state.items() if name.startswith("exp_avg/")}


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return |left - right| / |left| over all tensors together."""
    assert set(left) == set(right)
    difference = (
        sum(float((left[name].double() - right[name].double()).square().sum()) for name in left) ** 0.5
    )
    return difference / sum(float(tensor.double().square().sum()) for tensor in left.values()) ** 0.5


def beats(run: Path, rank: int) -> dict[str, Any]:
    """Return what a rank last said of itself."""
    path = run / "heartbeat" / f"rank{rank}"
    return json.loads(path.read_text()) if path.exists() else {}


def start_adapter(folder: Path) -> Path:
    """An adapter of builtin:tiny whose B is not zero, so that A has a gradient from the first step."""
    torch.manual_seed(3)
    model = load_model(resolve_source(TINY), torch.float32, "sdpa")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(str(folder / "adapter"))
    return folder / "adapter"
