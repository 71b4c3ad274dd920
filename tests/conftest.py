"""What every test runs in: its own home and cache, no network, no trace of another launcher's environment."""

import os
import tempfile
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FINETUNE_HOME of the test's own."""
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
