"""explain-error on everything that it may be given: a code, a run, a log, a folder of logs, a text, an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder

UNKNOWN = (
    'Traceback (most recent call last):\n  File "/x/own.py", line 3, in f\n    g()\nFooError: never seen\n'
)
FULL = UNKNOWN.replace("line 3", "line 9").replace(
    "FooError: never seen", "OSError: [Errno 28] No space left on device"
)
GONE = (
    'Traceback (most recent call last):\n  File "/x/t.py", line 9, in f\n    all_reduce()\n'
    "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242\n"
)


def explained(command: Any, what: str | Path) -> dict[str, Any]:
    answer, code = command("explain-error", str(what))
    assert code == 0, answer
    return dict(answer)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("out_of_memory", "out_of_memory"),
        ("low_entropy", "low_entropy"),
        ("rewards_zero", "rewards_zero"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("bwrap: No permissions to create a new namespace", "no_sandbox"),
        (UNKNOWN + "\n" + FULL, None),
    ],
)
def test_codes_and_texts(command: Any, text: str, hint: str | None) -> None:
    answer = explained(command, text)
    assert (answer["status"], answer["data"]["hint_id"]) == ("known" if hint else "unknown", hint)


def test_a_log_shows_its_first_error_and_where_it_stands(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"10%|#\r20%|##\r" + (FULL + "\n" + UNKNOWN).encode())
    data = explained(command, path)["data"]
    assert (data["hint_id"], data["pattern"], data["line"], data["log"]) == (
        "disk_full",
        "disk_full",
        3,
        str(path),
    )
    assert data["error"] == "OSError: [Errno 28] No space left on device"
    assert data["others"] == [
        {"hint_id": None, "error": "FooError: never seen", "log": "train.log", "line": 8}
    ]


def test_an_unknown_error_is_shown_and_nothing_is_guessed(command: Any, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join(map(str, range(90))) + "\n" + UNKNOWN + "\n" + GONE)
    answer = explained(command, tmp_path / "train.log")
    assert (answer["status"], answer["data"]["hint_id"]) == ("unknown", None)
    assert answer["data"]["last_frame"] == 'File "/x/own.py", line 3, in f'
    assert answer["data"]["text"] == UNKNOWN.splitlines()
    assert answer["data"]["others"][0]["hint_id"] == "rank_died"
    assert "FooError" in answer["summary"]
    (tmp_path / "quiet.log").write_text("\n".join(f"step {step}" for step in range(90)))
    answer = explained(command, tmp_path / "quiet.log")
    assert answer["status"] == "unknown"
    assert answer["data"]["text"] == [f"step {step}" for step in range(70, 90)]


def test_over_the_logs_of_many_ranks_the_cause_comes_before_what_followed(
    command: Any, tmp_path: Path
) -> None:
    for rank in range(8):
        folder = tmp_path / "logs" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(FULL if rank == 5 else GONE)
    summary = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode  : 1 (pid: 4711)\n"
    )
    (tmp_path / "logs" / "launcher.log").write_text(UNKNOWN.replace("FooError: never seen\n", summary))
    data = explained(command, tmp_path / "logs")["data"]
    assert data["hint_id"] == "disk_full"
    assert data["log"].endswith("/5/stderr.log")
    assert {other["hint_id"] for other in data["others"]} == {"rank_died"}
    (tmp_path / "empty").mkdir()
    assert explained(command, tmp_path / "empty")["status"] == "no error"


def test_an_answer_and_the_folder_of_a_job_are_explained(command: Any, tmp_path: Path) -> None:
    answer, _ = command("status", "/nowhere")
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    assert explained(command, tmp_path / "answer.json")["data"]["hint_id"] == "run_missing"
    assert explained(command, tmp_path)["data"]["hint_id"] == "run_missing"
    (tmp_path / "answer.json").write_text(json.dumps(answer | {"errors": []}))
    assert explained(command, tmp_path)["status"] == "no error"


def test_a_run_is_explained_by_its_manifest_by_folder_and_by_id(
    standin: Any, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("run", *flags, how="steps:3,crash:OSError No space left on device")
    assert code == 8
    for name in (str(folder.path), answer["run_id"]):
        found, code = standin("explain-error", name)
        assert (code, found["data"]["hint_id"], found["data"]["fix"]) == (
            0,
            "disk_full",
            answer["errors"][0]["fix"],
        )


def test_a_run_without_an_error_shows_its_health(standin: Any, flags: list[str], folder: RunFolder) -> None:
    answer, code = standin("run", *flags, how="steps:3")
    assert code == 0, answer
    found, code = standin("explain-error", str(folder.path))
    assert (code, found["status"], found["data"]["health"]) == (0, "no error", [])
