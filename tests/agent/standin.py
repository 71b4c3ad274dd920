"""The runner with children that take no time: the console command, its two kinds of children speaking the file protocol.

    python tests/agent/standin.py VERB ...      the command, with stand-in children
    python tests/agent/standin.py --train DIR   the training child
    python tests/agent/standin.py --probe REQUEST ANSWER
    python tests/agent/standin.py --supervise DIR LOCK   the supervisor of a detached run, with the same children
    python tests/agent/standin.py --serve DIR   the MCP server, whose runs have the same children

They load no model, so they show nothing about training: what a step does, what a checkpoint holds, whether ranks stop
together. The tests of the real children are in test_end_to_end.py. FINETUNE_STANDIN says how the training child behaves:
NAME or NAME:VALUE, comma-separated: steps, pause, fail, crash, print, die, deaf; saves: a checkpoint every so many steps,
besides the one of the end; tokens sampled and bytes written in a step; checks: seconds that the full checks take, refuse:
they fail; dead-supervisor: it ends at once; free-disk, free-memory: what the watcher sees, devices: so many accelerators
that there are not, limit-grace: how long it waits for a save; refuse-with: the text of a rank's error.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from finetune.errors import FinetuneError  # noqa: E402
from finetune.records import Journal, write_atomically  # noqa: E402

HERE = str(Path(__file__).resolve())


def behaviour() -> dict[str, str]:
    parts = filter(None, os.environ.get("FINETUNE_STANDIN", "").split(","))
    return {name: value for name, _, value in (part.partition(":") for part in parts)}


def train(run_dir: Path) -> int:
    plan = json.loads((run_dir / "plan.json").read_text())
    how = behaviour()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: asked.append(got))
    journal = Journal(run_dir)
    done = [int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob("step-*/manifest.json")]
    start, steps = max(done, default=0), plan["arithmetic"]["steps"]
    print(how.get("print", "training"), flush=True)
    if start:
        journal.event("resumed", step=start, folder="")
    journal.rewind(start)
    result = {"steps": start, "train_loss": 1.0, "eval_before": None, "eval_after": None, "lift": None}
    result |= {
        "facts": {
            "parallel": "none",
            "world_size": 1,
            "resumed_from": start or None,
            "peak_memory_bytes": [1],
        }
    }
    for step in range(start + 1, steps + 1):
        journal.heartbeat("training", step=step)
        time.sleep(float(how.get("pause", 0)))
        if "bytes" in how:
            (run_dir / f"rollout-{step}").write_bytes(bytes(int(how["bytes"])))
        if how.get("fail") and step == 2:
            return finish(
                run_dir,
                None,
                {"code": how["fail"], "message": "told to", "evidence": {}, "rank": 0, "traceback": None},
            )
        if "refuse-with" in how:
            error = {"code": "training_failed", "message": how["refuse-with"], "evidence": {}, "rank": 0}
            error["traceback"] = f"RuntimeError: {how['refuse-with']}"
            write_atomically(run_dir / "heartbeat" / "rank0.error.json", json.dumps(error))
            return finish(run_dir, None, error)
        if "crash" in how and step == 2:
            raise RuntimeError(how["crash"] or "a failure that nobody knows")
        if "die" in how and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        more = {"reward_mean": step / 10, "truncated_share": 0.5} if plan["method"] == "grpo" else {}
        more |= {"sampled_tokens": int(how["tokens"])} if "tokens" in how else {}
        figures = {"loss": 1.0 / step, "grad_norm": 1.0, "step_s": 0.01, "tokens_per_s": 10.0} | more
        journal.metrics(step, num_steps=steps, **figures)
        is_asked = bool(asked) and "deaf" not in how
        if is_asked or step == steps or ("saves" in how and step % int(how["saves"]) == 0):
            save(run_dir, step)
            result["steps"] = step
            if is_asked and step < steps:
                return finish(run_dir, result | {"status": "stopped"}, None)
    (run_dir / "adapter").mkdir(exist_ok=True)
    (run_dir / "adapter" / "adapter_model.safetensors").write_text(str(steps))
    return finish(run_dir, result | {"status": "succeeded"}, None)


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}")


def finish(run_dir: Path, result: dict | None, error: dict | None) -> int:
    status = result["status"] if result else "failed"
    write_atomically(
        run_dir / "outcome.json", json.dumps({"status": status, "result": result, "error": error})
    )
    if error:
        return FinetuneError(error["code"], "").exit_code
    return 10 if status == "stopped" else 0


def probe(request: Path, answer: Path) -> int:
    asked = json.loads(request.read_text())
    how = behaviour()
    time.sleep(float(how.get("checks", 0)))
    if "refuse" in how:
        errors = [
            {"code": code, "message": f"told to: {code}", "evidence": {}} for code in ("too_long", "bad_row")
        ]
        answer.write_text(json.dumps({"ok": False, "errors": errors, "warnings": [], "data": {}}))
        return 3
    if "die-in-checks" in how:
        raise ModuleNotFoundError("No module named 'nothing'")
    ledger = {"read": 32, "trained": 32, "held_out": 0, "dropped": {}, "truncated": {}, "notes": {}}
    data = {
        "prepared": "/nowhere",
        "reused": False,
        "ledger": ledger,
        "report": {},
        "num_rows": 32,
        "num_eval_rows": 10,
    }
    data["memory"] = {"forecast_bytes_per_rank": int(how.get("memory", 1)), "parts": {}}
    data["steps"] = asked["settings"]["max_steps"] or int(how.get("steps", 3))
    warnings = [{"code": "duplicate_rows", "text": "two rows are equal"}]
    answer.write_text(json.dumps({"ok": True, "errors": [], "warnings": warnings, "data": data}))
    return 0


def replace_children() -> None:
    """Have this file stand in for every child process that our program starts."""
    from agent import attempt, budgets, handles, plan, probing, processes, supervisor, system

    how = behaviour()
    plan.launch_argv = lambda run_dir: [sys.executable, HERE, "--train", str(run_dir)]

    def start_child(argv, *rest, **options):  # type: ignore[no-untyped-def]
        arguments = [HERE, "--probe", *argv[3:]] if "finetune.probe" in argv else argv[1:]
        return processes.start_child([argv[0], *arguments], *rest, **options)

    probing.start_child = start_child
    supervisor.supervisor_command = lambda folder, lock: [
        sys.executable,
        HERE,
        "--supervise",
        str(folder.path),
        str(lock),
    ]
    handles.job_command = lambda argv: [sys.executable, HERE, *argv]
    if "limit-grace" in how:
        attempt.LIMIT_GRACE_S = float(how["limit-grace"])
    if "devices" in how:
        present = [system.Device(str(index), "H", 80 << 30, 79 << 30) for index in range(int(how["devices"]))]
        system.installed_devices = lambda root: present
        system.torch_build = lambda: "cuda"
    if "free-disk" in how:
        budgets.free_disk = lambda path: int(how["free-disk"])
    if "free-memory" in how:
        budgets.memory = lambda: (1 << 30, int(how["free-memory"]))


def command(argv: list[str]) -> int:
    """The console command with its children replaced by this file."""
    from agent import cli

    replace_children()
    return cli.main(argv)


def supervise(run_dir: Path, lock: int) -> int:
    from agent import supervisor
    from agent.folder import RunFolder

    if "dead-supervisor" in behaviour():
        sys.exit("told to die")
    replace_children()
    return supervisor.supervise(RunFolder(run_dir), lock)


def serve(root: str) -> None:
    from agent import mcp

    replace_children()
    mcp.main([root])


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        sys.exit(train(Path(sys.argv[2])))
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    if sys.argv[1] == "--supervise":
        sys.exit(supervise(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(
        probe(Path(sys.argv[2]), Path(sys.argv[3])) if sys.argv[1] == "--probe" else command(sys.argv[1:])
    )
