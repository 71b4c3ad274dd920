"""The run folder: lock, documents, schemas."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.folder import RunFolder, is_locked, locked, new_run_id, read_document, schema, write_document
from agent.states import first_state
from finetune.errors import FinetuneError


def test_a_lock_is_held_once_and_seen_by_readers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not is_locked(folder)
    with locked(folder) as lock:
        assert lock is not None
        assert is_locked(folder)
        with locked(folder, wait_s=0.1) as second:
            assert second is None
    assert not is_locked(folder)


def test_a_caller_without_stdin_hands_the_lock_on_too(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from agent.folder import RunFolder, locked
with locked(RunFolder(Path({str(tmp_path)!r}))) as lock:
    child = subprocess.Popen(["sleep", "60"], stdin=-3, stdout=-3, stderr=-3, pass_fds=[lock])
sys.stderr.write(str(child.pid))
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$1" <&- >/dev/null', sys.executable, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert is_locked(RunFolder(tmp_path))
    os.kill(int(done.stderr), signal.SIGKILL)


def test_the_lock_of_a_folder_that_was_taken_away_counts_for_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with locked(folder):
        folder.lock.unlink()
        with locked(folder, wait_s=0.5) as second:
            assert second is not None
            assert os.path.samestat(os.fstat(second), os.stat(folder.lock))


def test_a_document_that_breaks_its_schema_is_never_written(tmp_path: Path) -> None:
    state = first_state("sft-1", "0" * 16, "host")
    write_document(tmp_path / "state.json", "state", state)
    with pytest.raises(Exception, match="planned"):
        write_document(tmp_path / "state.json", "state", state | {"state": "dancing"})
    assert read_document(tmp_path / "state.json", "state") == state
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": "1"}'])
def test_a_foreign_document_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(FinetuneError, match=r"state\.json is no state document") as raised:
        read_document(tmp_path / "state.json", "state")
    assert raised.value.code == "run_missing"


def test_documents_hold_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-TEST")
    state = first_state("sft-1", "0" * 16, "host") | {"operation": "calling with sk-TEST"}
    write_document(tmp_path / "state.json", "state", state)
    assert json.loads((tmp_path / "state.json").read_text())["operation"] == "calling with ***"


def test_the_newest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_checkpoint() is None
    for step, is_complete in ((2, True), (10, True), (12, False)):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        if is_complete:
            (tmp_path / f"checkpoints/step-{step}/manifest.json").touch()
    assert folder.last_checkpoint() == tmp_path / "checkpoints/step-10"


def test_run_ids_differ_within_a_second() -> None:
    assert len({new_run_id("sft") for _ in range(500)}) == 500


def test_every_schema_ships() -> None:
    for name in ("answer", "plan", "run", "state"):
        assert schema(name)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
