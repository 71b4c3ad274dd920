"""What every test runs in: its own home and cache, no network, no trace of another launcher's environment."""

import os
import tempfile
from pathlib import Path

import pytest

# Tests of processes that start, die and wait for each other, none of them a guard of exactness or of secrets.
_WATCHING = {
    "agent": "test_control test_engines test_faults test_handles test_mcp test_processes test_runner test_stories"
    " test_supervisor test_tools",
    "boxes": "test_bubblewrap test_container test_process test_sharing",
    "rollout": "test_agent_programs test_bridge_clients test_endpoint test_harness test_recovery test_server_process",
}
_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module is imported, so that child processes see it too.

    Runs, plans and prepared data are made anew; converted builtin models, the same bytes every time, are shared by
    all sessions of this machine.
    """
    shared = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune")) / "models"
    shared.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="finetune-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    root = Path(folder.name)
    (root / "cache").mkdir()
    (root / "cache" / "models").symlink_to(shared)
    os.environ |= {
        "FINETUNE_HOME": str(root / "home"),
        "FINETUNE_CACHE": str(root / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(root / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in _INHERITED:
        os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU; have one worker run all that starts vLLM servers, from the beginning.

    Two servers at once would share two cores, and each worker would start its own. What watches processes gets a second
    try, shown as RERUN: such a test waits for others on a machine whose load nobody knows. What computes gets none.
    """
    for item in items:
        if item.path.stem in _WATCHING.get(item.path.parent.name, "").split():
            item.add_marker(pytest.mark.flaky(reruns=1))
    with_engines = [item for item in items if _starts_engines(item)]
    for item in with_engines:
        item.add_marker(pytest.mark.xdist_group("engines"))
    chosen = set(with_engines)
    items[:] = [*with_engines, *(item for item in items if item not in chosen)]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _starts_engines(item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") or item.get_closest_marker("proof")
    path = item.path.as_posix()
    return bool(is_slow) and ("/tests/rollout/" in path or path.endswith("test_grpo_vllm.py"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FINETUNE_HOME of the test's own."""
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
