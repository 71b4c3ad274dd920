"""Faults that one command shows: each function causes one from outside and returns the command's (answer, exit code)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.folder import RunFolder, locked, write_document
from agent.states import first_state
from tests.agent.faults.place import Place

Result = tuple[dict[str, Any], int]
TURN = {"role": "user", "content": "Say 1."}
ANSWER = {"role": "assistant", "content": "1"}
FAULTS: dict[str, tuple[Callable[[Place], Result], str, int]] = {}


def fault(code: str, exit_code: int, hint: str | None = None) -> Callable[..., Any]:
    """Register a function that causes a fault and returns (answer, exit code); hint: where it is not that of the code."""

    def register(cause: Callable[[Place], Result]) -> Callable[[Place], Result]:
        FAULTS[cause.__name__] = (cause, f"{code} {hint or code}", exit_code)
        return cause

    return register


# ---- the command line ----


@fault("unknown_setting", 2)
def a_flag_with_a_slip(place: Place) -> Result:
    return place.planned("--leraning-rate", "1e-3")


@fault("bad_value", 2)
def no_ranks(place: Place) -> Result:
    return place.planned("--num-gpus", "0")


@fault("batch_arithmetic", 2)
def a_batch_that_does_not_divide(place: Place) -> Result:
    return place.planned(
        "--global-batch-size", "8", "--batch-size-per-gpu", "3", "--gradient-accumulation", "3"
    )


@fault("setting_without_effect", 2)
def a_rank_of_adapters_that_are_not_there(place: Place) -> Result:
    return place.planned("--tuning", "full", "--lora-rank", "8")


@fault("settings_conflict", 2)
def two_seeds(place: Place) -> Result:
    return place.planned("--seed", "1", "--seed", "2")


@fault("usage", 2)
def a_verb_that_is_none(place: Place) -> Result:
    return place.call("trian")


@fault("bad_path", 2)
def a_run_folder_with_a_name_that_no_disk_takes(place: Place) -> Result:
    return place.planned("--out", "x" * 300)


# ---- data ----


@fault("file_missing", 3)
def rows_that_are_not_there(place: Place) -> Result:
    place.rows.unlink()
    return place.planned()


@fault("no_rows", 3)
def an_empty_file(place: Place) -> Result:
    place.rows.write_text("\n\n")
    return place.planned()


@fault("bad_row", 3)
def a_broken_line(place: Place) -> Result:
    place.write_rows({"prompt": "a", "completion": "b"}, '{"prompt": "a", "completion": ')
    return place.checked_in_full()


@fault("duplicate_key", 3)
def a_key_twice(place: Place) -> Result:
    place.write_rows('{"prompt": "a", "completion": "b", "prompt": "c"}')
    return place.checked_in_full()


@fault("unknown_columns", 3)
def columns_of_no_form(place: Place) -> Result:
    place.write_rows({"frage": "a", "antwort": "b"})
    return place.checked_in_full()


@fault("bad_roles", 3)
def a_role_that_nobody_has(place: Place) -> Result:
    place.write_rows({"messages": [{"role": "narrator", "content": "a"}, ANSWER]})
    return place.checked_in_full()


@fault("empty_assistant", 3)
def an_empty_answer(place: Place) -> Result:
    place.write_rows({"messages": [TURN, {"role": "assistant", "content": ""}]})
    return place.checked_in_full()


@fault("no_supervised_token", 3)
def a_conversation_without_an_answer(place: Place) -> Result:
    place.write_rows({"messages": [TURN]})
    return place.checked_in_full()


@fault("too_long", 3)
def rows_longer_than_the_limit(place: Place) -> Result:
    return place.checked_in_full("--max-length", "8")


@fault("too_few_rows", 3)
def rows_that_are_all_dropped(place: Place) -> Result:
    return place.checked_in_full("--max-length", "8", "--on-long", "drop")


@fault("bad_domain", 3)
def a_domain_without_its_functions(place: Place) -> Result:
    return place.checked_in_full("--domain", place.write("own.py", "def conversation(row):\n    return []\n"))


# ---- template ----


@fault("bad_template", 3)
def a_template_that_is_no_jinja(place: Place) -> Result:
    place.write_rows({"messages": [TURN, ANSWER]})
    return place.checked_in_full("--chat-template", place.write("own.jinja", "{% for m in messages %}"))


@fault("template_not_prefix_stable", 3)
def a_template_that_counts_the_turns(place: Place) -> Result:
    text = "{{ messages | length }}{% for m in messages %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    place.write_rows({"messages": [TURN, ANSWER, TURN, ANSWER]})
    return place.checked_in_full("--chat-template", place.write("own.jinja", text))


@fault("no_chat_template", 3)
def conversations_for_a_base_model(place: Place) -> Result:
    place.model = "builtin:tiny?template=none"
    place.write_rows({"messages": [TURN, ANSWER]})
    return place.checked_in_full()


# ---- model ----


def own_model(place: Place, **config: Any) -> Path:
    """Write the folder of a model without weights."""
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 9}
    place.model = str(place.folder / "model")
    place.write("model/config.json", json.dumps(known | config))
    return Path(place.model)


@fault("model_missing", 3)
def a_model_that_is_not_there(place: Place) -> Result:
    place.model = "./nowhere"
    return place.planned()


@fault("unsafe_model", 3)
def weights_in_a_pickle(place: Place) -> Result:
    own_model(place)
    place.write("model/pytorch_model.bin", "pickle")
    return place.planned()


@fault("unsupported_model", 3)
def a_model_that_speaks_no_text(place: Place) -> Result:
    own_model(place, architectures=["ViTForImageClassification"], model_type="vit")
    place.write("model/model.safetensors", "x")
    return place.planned()


@fault("offline", 5)
def a_hub_model_without_a_network(place: Place) -> Result:
    place.model = "me/never-fetched"
    return place.planned()


@fault("bad_adapter", 3)
def a_start_from_what_is_no_adapter(place: Place) -> Result:
    place.write("adapter/adapter_config.json", "{}")
    place.write("adapter/adapter_model.safetensors", "version https://git-lfs.github.com/spec/v1")
    return place.checked_in_full("--init-adapter", str(place.folder / "adapter"))


@fault("bad_profile", 3)
def a_profile_of_deepspeed(place: Place) -> Result:
    text = "distributed_type: DEEPSPEED\nnum_processes: 1\n"
    return place.planned("--profile", place.write("own.yaml", text))


# ---- machine ----


@fault("device_hidden", 4)
def a_gpu_that_a_sandbox_hides(place: Place) -> Result:
    place.root = place.folder / "machine"
    place.write("machine/proc/driver/nvidia/gpus/0000:01:00.0/information", "")
    return place.planned("--device", "auto")


@fault("no_device", 4)
def a_gpu_whose_driver_is_broken(place: Place) -> Result:
    place.root = place.folder / "machine"
    place.write("machine/dev/nvidia0", "")
    return place.planned("--device", "auto")


@fault("not_enough_memory", 3)
def a_machine_that_is_too_small(place: Place) -> Result:
    place.root = place.folder / "machine"
    place.write("machine/proc/meminfo", "MemTotal:  40000 kB\nMemAvailable:  20000 kB\n")
    return place.checked_in_full()


@fault("engine_missing", 4)
def a_python_without_vllm(place: Place) -> Result:
    flags = ["--vllm-python", "/bin/false", "--verifier", "exact"]
    place.write_rows({"prompt": "a", "answer": "b"})
    return place.planned("--group-size", "4", "--global-batch-size", "4", *flags, method="grpo")


@fault("no_sandbox", 4)
def a_machine_without_bubblewrap(place: Place) -> Result:
    place.write_rows(*({"prompt": "Add.", "tests": ["assert 1"], "solution": "x = 1"} for _ in range(4)))
    place.environ |= {"PATH": str(place.folder)}
    flags = [
        "--engine",
        "local",
        "--group-size",
        "4",
        "--global-batch-size",
        "4",
        "--verifier",
        "python-tests",
    ]
    return place.checked_in_full(*flags, method="grpo")


# ---- verifiers ----


def prompts(place: Place) -> None:
    place.write_rows(*({"prompt": f"Say {n}.", "answer": str(n)} for n in range(8)))


@fault("bad_verifier", 3)
def a_verifier_that_raises(place: Place) -> Result:
    prompts(place)
    return place.checked_in_full(
        *place.grpo("def score(completion):\n    return completion['text']\n"), method="grpo"
    )


@fault("blind_verifier", 3)
def a_verifier_that_likes_everything(place: Place) -> Result:
    prompts(place)
    return place.checked_in_full(*place.grpo("def score(completion):\n    return 1.0\n"), method="grpo")


@fault("bad_verifier", 3)
def a_verifier_that_never_ends(place: Place) -> Result:
    prompts(place)
    flags = place.grpo("def score(completion):\n    while True: pass\n", "--verifier-timeout", "0.3")
    return place.checked_in_full(*flags, method="grpo")


# ---- runs ----


@fault("run_missing", 3)
def a_run_that_is_not_there(place: Place) -> Result:
    return place.call("status", "sft-20260101-000000-00000000")


@fault("target_exists", 7)
def a_run_folder_with_foreign_files(place: Place) -> Result:
    place.write("run/thesis.txt", "years of work")
    return place.planned()


@fault("run_in_use", 7)
def a_run_folder_that_another_process_holds(place: Place) -> Result:
    with locked(RunFolder(place.out)):
        return place.trained()


@fault("no_checkpoint", 3)
def answers_of_a_run_that_saved_nothing(place: Place) -> Result:
    place.planned()
    plan = next((place.folder / "home" / "plans").glob("*.json"))
    place.write("run/plan.json", plan.read_text())
    state = first_state("sft-1", "0" * 16, "here") | {"state": "stopped"}
    write_document(RunFolder(place.out).state, "state", state)
    return place.call("generate", str(place.out), "--prompt", "a")


@fault("bad_rollouts", 3)
def recorded_rollouts_that_are_cut(place: Place) -> Result:
    prompts(place)
    place.write("other/rollouts/step-000001.jsonl", '{"kind": "step", "step": 1}\n{"id": "1-0')
    flags = ["--group-size", "4", "--global-batch-size", "8", "--replay", str(place.folder / "other")]
    flags += ["--verifier", "exact"]
    return place.trained(*flags, method="grpo")


@fault("no_learning_signal", 8)
def a_learning_rate_of_zero(place: Place) -> Result:
    return place.trained("--learning-rate", "0", "--max-steps", "2")


@fault("verifier_failed", 8)
def a_verifier_that_fails_on_what_the_model_says(place: Place) -> Result:
    prompts(place)
    text = (
        "def right(row):\n    return row['answer']\n"
        "def score(row, completion):\n"
        "    if completion and not completion.isdigit() and 'NaN' not in completion:\n"
        "        raise KeyError(completion)\n"
        "    return float(completion == row['answer'])\n"
    )
    flags = place.grpo(text, "--on-verifier-error", "stop", "--temperature", "10", "--max-steps", "2")
    return place.trained(*flags, method="grpo")
