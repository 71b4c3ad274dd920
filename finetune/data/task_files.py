"""A task as it lies in a folder: task.md, environment/, verifier/, oracle/; read, checked and digested.

Rule: all that is wrong with a folder is found in one reading, and what is not understood is refused, never passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import FinetuneError
from finetune.knobs import unknown_name

VERSION = 1
SETUP = "setup.sh"
BUILTIN = "builtin:"
DESK = Path(__file__).parents[1] / "domains" / "desk"
_LARGEST = 64 << 20  # bytes of one task folder
# name -> (kind, default, lowest, highest)
_NUMBERS: dict[str, tuple[type, float | int | None, float, float]] = {
    "timeout_s": (float, 600.0, 1, 86_400),
    "verifier_timeout_s": (float, 60.0, 1, 3_600),
    "max_steps": (int, None, 1, 10_000),
}
_RESOURCES: dict[str, tuple[type, float | int | None, float, float]] = {
    "cpu_s": (int, None, 1, 86_400),
    "memory_mb": (int, 2048, 16, 1 << 20),
    "processes": (int, 128, 4, 10_000),
    "file_mb": (int, 64, 1, 1 << 20),
    "workspace_mb": (int, 256, 1, 1 << 20),
}
_KEYS = (*_NUMBERS, "version", "resources", "allow_internet", "reward", "programs", "difficulty")
_PROGRAM_KEYS = ("command", "files", "stdin", "timeout_s")


@dataclass(frozen=True)
class Program:
    """A program of the agent that is run before the verifier, in a box of its own that holds neither verifier nor reward.

    command: what sh runs in a copy of the workspace, into which the files of the folder `files` (under verifier/) are laid
    before; stdin: a file under verifier/. What it prints and how it ends is what the verifier reads.
    """

    name: str
    command: str
    files: str | None = None
    stdin: str | None = None
    timeout_s: float = 10.0


@dataclass(frozen=True)
class TaskFile:
    """What a task folder says. reward: how the verifier tells it; script: test.sh or test_outputs.py."""

    folder: Path
    prompt: str
    numbers: dict[str, Any]
    resources: dict[str, Any]
    script: str
    reward: str
    programs: tuple[Program, ...]
    digest: str
    problem: str


@dataclass
class _Reading:
    """One reading of a folder: what was wrong so far."""

    folder: Path
    errors: list[FinetuneError] = field(default_factory=list)

    def wrong(self, text: str, file: str = "task.md") -> None:
        path = self.folder / file
        self.errors.append(
            FinetuneError("bad_task", f"{path}: {text}", file=str(path), task=self.folder.name)
        )


def task_folders(spec: str, list_folder: Path | None = None) -> list[Path]:
    """Return the folders of the tasks that `spec` names, absolute (see domains.tasks.load_tasks); raises file_missing."""
    path = Path(list_folder or Path.cwd(), Path(spec).expanduser())
    if spec.startswith(BUILTIN):
        name = spec.removeprefix(BUILTIN)
        path = DESK if name == "desk" else DESK / name.removeprefix("desk/")
        if not name.startswith("desk") or not path.is_dir():
            there = ", ".join(sorted(item.name for item in DESK.iterdir()))
            raise FinetuneError("file_missing", f"tasks: there is no {spec}; builtin:desk holds {there}")
    if path.is_file() and list_folder is None:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        found = [folder for line in lines if line for folder in task_folders(line, path.parent)]
    elif (path / "task.md").exists():
        found = [path]
    else:
        found = sorted(item.parent for item in path.glob("*/task.md"))
    if not found:
        text = f"tasks: {path} holds no task: a folder with task.md, or a folder of such folders"
        raise FinetuneError("file_missing", text, file=str(path))
    return [folder.resolve() for folder in found]


def read_task(folder: Path) -> TaskFile | list[FinetuneError]:
    """Return what a task folder says, or all that is wrong with it."""
    reading = _Reading(folder)
    files = _files(reading)
    front, prompt = _front_and_prompt(reading)
    numbers = _numbers(reading, front, _NUMBERS, "")
    resources = front.get("resources", {})
    if not isinstance(resources, dict):
        reading.wrong("resources is no mapping")
        resources = {}
    _known(reading, resources, tuple(_RESOURCES), "resources.")
    found = _numbers(reading, resources, _RESOURCES, "resources.")
    script = _script(reading, files)
    reward = _reward(reading, front, script)
    programs = _programs(reading, front, files)
    if "oracle/solve.sh" not in files:
        reading.wrong("missing: what solves the task, so that it can be checked", "oracle/solve.sh")
    if reading.errors:
        return reading.errors
    problem = {name: digest for name, digest in files.items() if name.startswith("environment/")}
    return TaskFile(
        folder,
        prompt,
        numbers,
        found,
        script,
        reward,
        programs,
        digest_of(files),
        digest_of(problem | {"prompt": hashlib.sha256(" ".join(prompt.split()).encode()).hexdigest()}),
    )


def digest_of(files: dict[str, str]) -> str:
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def hidden_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a task that its agent must not find."""
    for name in ("verifier", "oracle"):
        yield from (path for path in sorted((folder / name).rglob("*")) if path.is_file())


def _files(reading: _Reading) -> dict[str, str]:
    """Return path -> digest of the content of all files of the folder."""
    found: dict[str, str] = {}
    total = 0
    for path in sorted(reading.folder.rglob("*")):
        name = path.relative_to(reading.folder).as_posix()
        if "__pycache__" in path.parts:
            continue
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            reading.wrong("only ordinary files and folders make up a task; no links, no devices", name)
        elif path.is_file():
            total += path.stat().st_size
            if total > _LARGEST:
                reading.wrong(f"the task holds more than {_LARGEST >> 20} MB", name)
                break
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _front_and_prompt(reading: _Reading) -> tuple[dict[str, Any], str]:
    try:
        text = (reading.folder / "task.md").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reading.wrong(f"cannot be read: {error}")
        return {}, ""
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    if not text.startswith("---\n") or not body:
        reading.wrong(
            "does not begin with a front matter in YAML between two lines of ---, a prompt behind it"
        )
        return {}, ""
    front: Any = None
    try:
        front = yaml.safe_load(head)
    except yaml.YAMLError as error:
        reading.wrong(f"the front matter is no YAML: {' '.join(str(error).split())}")
        return {}, body.strip()
    if not isinstance(front, dict):
        reading.wrong("the front matter is no mapping")
        return {}, body.strip()
    if not body.strip():
        reading.wrong("has no prompt behind the front matter")
    _known(reading, front, _KEYS, "")
    if front.get("version") != VERSION or isinstance(front.get("version"), bool):
        reading.wrong(f"version must be {VERSION}, and is {front.get('version', 'missing')}")
    if front.get("allow_internet", False) is not False:
        reading.wrong("allow_internet must be false: boxes have no network but the model's endpoint")
    return front, body.strip()


def _known(reading: _Reading, given: dict[Any, Any], keys: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in keys:
            wrong = unknown_name(str(key), list(keys)).replace("setting", "key")
            reading.wrong(f"{where}{wrong}")


def _numbers(reading: _Reading, given: dict[str, Any], wanted: dict[str, Any], where: str) -> dict[str, Any]:
    found = {}
    for name, (kind, default, least, most) in wanted.items():
        value = given.get(name, default)
        found[name] = value
        if value is None and default is None:
            continue
        kinds = (int, float) if kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            what = "a number" if kind is float else "a whole number"
            reading.wrong(f"{where}{name}: {value!r} is not {what} from {least:g} to {most:g}")
    return found


def _script(reading: _Reading, files: dict[str, str]) -> str:
    found = [name for name in ("test.sh", "test_outputs.py") if f"verifier/{name}" in files]
    if not found:
        reading.wrong("needs test.sh or test_outputs.py", "verifier")
        return "test.sh"
    return found[0]


def _reward(reading: _Reading, front: dict[str, Any], script: str) -> str:
    """Return how the reward is told. A script that names a reward file must write it: its exit code alone is no reward."""
    allowed = ("file", "exit_code") if script == "test.sh" else ("tests", "share_of_tests")
    if "reward" in front:
        if front["reward"] not in allowed:
            reading.wrong(
                f"reward: {front['reward']!r} is none of {', '.join(allowed)}, which a {script} can tell"
            )
        return str(front["reward"])
    if script != "test.sh":
        return "tests"
    try:
        text = (reading.folder / "verifier/test.sh").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return "file" if "REWARD_DIR" in text else "exit_code"


def _programs(reading: _Reading, front: dict[str, Any], files: dict[str, str]) -> tuple[Program, ...]:
    given = front.get("programs", {})
    if not isinstance(given, dict):
        reading.wrong("programs is no mapping of names to commands")
        return ()
    found = []
    for name, about in given.items():
        where = f"programs.{name}."
        if not isinstance(about, dict) or not isinstance(about.get("command"), str):
            reading.wrong(f"{where}command is missing: what sh runs in a copy of the workspace")
            continue
        if not str(name).replace("_", "").replace("-", "").isalnum():
            reading.wrong(f"programs: {name!r} is no name of letters, digits, - and _")
        _known(reading, about, _PROGRAM_KEYS, where)
        seconds = _numbers(reading, about, {"timeout_s": (float, 10.0, 0.1, 3_600)}, where)["timeout_s"]
        for key in ("files", "stdin"):
            if (path := about.get(key)) is not None and not _is_there(f"verifier/{path}", key, files):
                reading.wrong(f"{where}{key}: there is no verifier/{path}")
        found.append(
            Program(str(name), about["command"], about.get("files"), about.get("stdin"), float(seconds))
        )
    return tuple(found)


def _is_there(path: str, key: str, files: dict[str, str]) -> bool:
    return path in files if key == "stdin" else any(name.startswith(f"{path}/") for name in files)
