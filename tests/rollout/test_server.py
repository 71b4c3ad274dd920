"""What own servers are started with, and what their logs tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from finetune.errors import FinetuneError
from finetune.rollout import server as server_module
from finetune.rollout.server import (
    ServerSettings,
    cache_gib,
    server_command,
    server_environment,
)
from finetune.rollout.serverlog import first_traceback, plain_lines, read_since, start_failure
from finetune.rules import served_lora_rank


def test_the_served_rank_is_the_next_that_vllm_takes() -> None:
    assert [served_lora_rank(rank) for rank in (1, 4, 8, 24, 257, 321, 512)] == [8, 8, 8, 32, 320, 512, 512]
    with pytest.raises(FinetuneError, match="up to rank 512") as caught:
        served_lora_rank(513)
    assert caught.value.code == "bad_value"


def test_the_command_fixes_what_exact_tokens_rest_on(settings: ServerSettings) -> None:
    command = server_command(replace(settings, lora_rank=24, max_loras=4), 4711, "mine")
    text = " ".join(command)
    for part in (
        f"--model {settings.model} --host 127.0.0.1 --port 4711 --dtype bfloat16",
        "--generation-config vllm --logprobs-mode processed_logprobs --enable-scale-out",
        "--max-model-len 128 --max-num-seqs 16",
        "--enable-lora --max-lora-rank 32 --max-loras 4",
        "--worker-extension-cls finetune.rollout.weights.ServedWeights",
        "--served-model-name base mine",
    ):
        assert part in text
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert "--tensor-parallel-size" not in text
    bare = " ".join(server_command(replace(settings, extension=None), 1, "x"))
    assert "lora" not in bare
    assert "extension" not in bare


def test_on_devices_the_command_has_their_number_and_share(settings: ServerSettings) -> None:
    text = " ".join(
        server_command(
            replace(settings, devices=("2", "3"), tensor_parallel=2, memory_fraction=0.3), 1, "mine"
        )
    )
    assert "--tensor-parallel-size 2 --gpu-memory-utilization 0.3" in text
    environment = server_environment(replace(settings, devices=("2", "3")), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_further_arguments_are_passed_on_but_not_those_that_are_ours(settings: ServerSettings) -> None:
    text = " ".join(server_command(replace(settings, more=("max-num-seqs=8", "--enforce_eager")), 1, "mine"))
    assert "--max-num-seqs 8" in text
    assert "--max-num-seqs 16" not in text
    assert "--enforce-eager" in text
    for more in ("generation-config=auto", "--logprobs_mode=raw_logprobs", "no-enable-lora", "port=1", "=3"):
        with pytest.raises(FinetuneError, match="vllm_args") as caught:
            server_command(replace(settings, more=(more,)), 1, "mine")
        assert caught.value.code == "bad_value"


def test_the_environment_has_no_ranks_and_no_secrets_but_the_hubs(settings: ServerSettings) -> None:
    outside = {
        "PATH": "/bin",
        "HF_TOKEN": "hub",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "PYTHONPATH": "/theirs",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OPENAI_API_KEY": "secret",
        "VLLM_API_KEY": "secret",
        "VLLM_PORT": "1",
        "http_proxy": "http://proxy",
        "OMP_NUM_THREADS": "64",
    }
    found = server_environment(replace(settings, threads=3), outside)
    assert (found["PATH"], found["HF_TOKEN"], found["VLLM_CPU_KVCACHE_SPACE"]) == ("/bin", "hub", "3")
    assert not set(found) & {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "OPENAI_API_KEY",
        "VLLM_API_KEY",
        "VLLM_PORT",
        "http_proxy",
    }
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == (
        "3",
        "passive",
        "0",
    )
    assert found["PYTHONPATH"].split(os.pathsep) == [
        str(Path(server_module.__file__).parents[2]),
        "/theirs",
    ]
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_another_python_sees_our_source_and_none_of_our_packages(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "finetune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("found = True")
    (package.parent / "torch.py").write_text("raise SystemExit")
    monkeypatch.setattr(server_module.finetune, "__path__", [str(package)])
    for _ in range(2):
        path = server_environment(replace(settings, python="/other/python"), {})["PYTHONPATH"]
        assert [entry.name for entry in Path(path).iterdir()] == ["finetune"]
    done = subprocess.run(
        [sys.executable, "-c", "import finetune; print(finetune.found)"],
        env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_the_cache_holds_all_completions_within_a_quarter_of_the_memory(settings: ServerSettings) -> None:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (settings.model / "config.json").write_text(json.dumps(config))
    # 2 (key, value) * 30 * 3 * 64 * 2 bytes = 23,040 a token; 64 * 1,024 of them are 1.41 GiB
    wide = replace(settings, concurrency=64, max_model_len=1024)
    assert cache_gib(wide) == 2
    assert cache_gib(replace(wide, dtype="float32")) == 3
    assert cache_gib(settings) == 1
    most = psutil.virtual_memory().total / 4 / 2**30
    assert most <= cache_gib(replace(wide, concurrency=1 << 20)) < most + 1


PASSED_ON = """INFO 11-29 21:09:13 [api.py:1] starting
(EngineCore pid=17) ERROR 11-29 21:09:14 [core.py:11] EngineCore failed to start.
(EngineCore pid=17) ERROR 11-29 21:09:14 [core.py:11] Traceback (most recent call last):
(EngineCore pid=17) ERROR 11-29 21:09:14 [core.py:11]   File "x.py", line 3, in f
(EngineCore pid=17) ERROR 11-29 21:09:14 [core.py:11]     raise ValueError(
(EngineCore pid=17) ERROR 11-29 21:09:14 [core.py:11] {error}
(APIServer pid=16) Traceback (most recent call last):
(APIServer pid=16)   File "y.py", line 3, in g
(APIServer pid=16) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ValueError: No available memory for the cache blocks.", "engine_out_of_memory"),
        (
            "ValueError: Free memory on device cuda:0 (3.1/80 GiB) on startup is less than",
            "engine_out_of_memory",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "engine_out_of_memory"),
        (
            "ValueError: To serve at least one request, 9 GiB KV cache is needed, which is larger than the available"
            " KV cache memory (1 GiB).",
            "engine_out_of_memory",
        ),
        ("ValueError: Model architectures ['FooLM'] are not supported for now.", "engine_model"),
        (
            "pydantic: User-specified max_model_len (999) is greater than the derived max_model_len",
            "engine_model",
        ),
        ("KeyError: 'something else'", "engine_failed"),
    ],
)
def test_the_earliest_traceback_tells_the_kind_of_failure(tmp_path: Path, error: str, code: str) -> None:
    found = start_failure(None, "the engine ended", PASSED_ON.format(error=error), tmp_path / "log")
    assert found.code == code
    assert error in found.message
    assert found.evidence["traceback"][-1] == error


def test_refused_arguments_and_empty_logs_have_their_words(tmp_path: Path) -> None:
    usage = "usage: api_server [options]\napi_server: error: unrecognized arguments: --nonsense 3\n"
    found = start_failure(None, "the engine ended", usage, tmp_path / "log")
    assert (found.code, "--nonsense" in found.message) == ("bad_value", True)
    assert "its log is empty" in start_failure(None, "it ended", "", tmp_path / "log").message
    assert first_traceback(["nothing"]) == []
    assert plain_lines("(Worker pid=3) INFO 11-29 21:09:13 [a.py:1] text") == ["text"]


def test_only_the_last_start_of_a_log_is_read_and_of_a_long_one_both_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\nnew\r\n10%\r20%\n")
    assert read_since(log, 4) == "new\n10%\n20%\n"
    log.write_bytes(b"first\n" + b"x" * 5_000_000 + b"\nlast")
    text = read_since(log, 0)
    assert (text.startswith("first"), text.endswith("last"), len(text) < 3_000_000) == (True, True, True)
