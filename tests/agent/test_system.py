"""Devices that are visible, hidden or broken; memory in containers."""

from pathlib import Path

import pytest

from agent.system import Device, find_devices, memory, read_machine, source_state

A, B, C = Device("0", "a"), Device("1", "b"), Device("2", "c")


def nodes(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C]),
        ("2,0", [C, A]),
        ("1", [B]),
        ("1,7,0", [B]),  # what follows an unknown id is not seen by CUDA either
    ],
)
def test_visible_devices_keep_their_order(
    tmp_path: Path, visible: str | None, expected: list[Device]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices, missing, _ = find_devices(environ, tmp_path, [A, B, C], "cuda")
    assert (list(devices), missing) == (expected, None)


@pytest.mark.parametrize("empty", ["", "-1", "NoDevFiles"])
def test_devices_hidden_by_the_environment(tmp_path: Path, empty: str) -> None:
    assert find_devices({"CUDA_VISIBLE_DEVICES": empty}, tmp_path, [A], "cuda")[:2] == ((), "hidden")


def test_devices_hidden_by_a_sandbox(tmp_path: Path) -> None:
    root = nodes(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0")
    devices, missing, signs = find_devices({}, root, [], "cuda")
    assert (devices, missing) == ((), "hidden")
    assert signs == ("the driver lists 0000:01:00.0", "torch is built for cuda")


def test_a_broken_driver_is_told_from_a_hidden_device(tmp_path: Path) -> None:
    root = nodes(tmp_path, "dev/nvidia0", "dev/nvidiactl")
    assert find_devices({}, root, "NVML cannot start (code 18)", None)[:2] == ((), "broken")
    assert find_devices({}, root, [], None)[1] == "broken"


def test_a_visible_device_needs_a_torch_that_was_built_for_it(tmp_path: Path) -> None:
    assert find_devices({}, tmp_path, [A], None)[:2] == ((), "no_torch_build")


def test_a_machine_without_any_sign_has_no_device_and_misses_none(tmp_path: Path) -> None:
    assert find_devices({}, tmp_path, [], None) == ((), None, ())


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    nodes(tmp_path, "proc/meminfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8192 kB\nMemAvailable:  4096 kB\n")
    assert memory(tmp_path) == (8192 * 1024, 4096 * 1024)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory(tmp_path) == (8192 * 1024, 4096 * 1024)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("400000\n")
    assert memory(tmp_path) == (1000000, 600000)


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes
    assert source_state().keys() == {"commit", "dirty"}
