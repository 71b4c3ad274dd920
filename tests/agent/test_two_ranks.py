"""The command with two real ranks under FSDP2, watched from outside."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder
from agent.system import DEVICE_LISTS
from tests.agent.calls import TINY, checked, document

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FINETUNE = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py")]
SECRETS = {"HF_TOKEN": "hf_TESTTESTTEST", "WANDB_API_KEY": "k_TEST00", "OPENAI_API_KEY": "sk-TEST0000"}
UMASK = 0o027


@dataclass(frozen=True)
class Seen:
    """A process while the command ran."""

    argv: list[str]
    environ: dict[str, str]

    def runs(self, module: str) -> bool:
        return self.argv[1:3] == ["-m", module]


@dataclass
class Watched:
    """Commands in folder/x, with what all their processes were started with."""

    folder: Path
    seen: dict[tuple[int, str], Seen] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        own = {"FINETUNE_HOME": str(self.folder / "home"), "FINETUNE_CACHE": str(self.folder / "cache")}
        return os.environ | own | SECRETS

    def __call__(self, *argv: str, cwd: Path, stop_in: RunFolder | None = None) -> tuple[dict[str, Any], int]:
        """Return the answer of a command; it is told to stop when a step of the run in `stop_in` is done."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(
            [*FINETUNE, *argv], env=self.environ, cwd=cwd, text=True, umask=UMASK, **pipes
        )
        while process.poll() is None:
            self._look()
            if stop_in is not None and stop_in.metrics.exists() and stop_in.metrics.stat().st_size:
                process.terminate()
                stop_in = None
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert process.stdout is not None
        return checked(process.stdout.read(), process.returncode), process.returncode

    def _look(self) -> None:
        home = f"FINETUNE_HOME={self.folder / 'home'}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                environ, argv = (place / "environ").read_bytes(), (place / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if home in environ.split(b"\0") and argv:
                pairs = (part.partition("=") for part in environ.decode().split("\0") if part)
                named = {name: value for name, _, value in pairs}
                self.seen[int(place.name), argv] = Seen(argv.split("\0")[:-1], named)


def wanted(folder: Path, steps: int) -> tuple[Path, list[str]]:
    """Return a working directory with rows under an awkward name, and the command to be given there: 2 ranks, FSDP2."""
    place = folder / "x"
    (place / "d ä 1").mkdir(parents=True)
    rows = [{"prompt": f"Say {n}.", "completion": f"Number {n}!"} for n in range(24)]
    (place / "d ä 1" / "a b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        f"--num-gpus 2 --parallel fsdp2 --dtype fp32 --threads 1 --global-batch-size 4 --max-steps {steps}"
    )
    return place, ["run", *TINY, "--data", "./d ä 1/a b.jsonl", "--out", "./o ü/", *flags.split()]


@dataclass(frozen=True)
class Story:
    watched: Watched
    folder: RunFolder
    dry: dict[str, Any]
    answer: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        return document(self.folder.manifest, "run")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run that was planned and carried out."""
    watched = Watched(tmp_path_factory.mktemp("two ranks"))
    place, argv = wanted(watched.folder, 3)
    dry = watched(*argv, "--dry-run", cwd=place)[0]
    watched.seen.clear()
    answer, code = watched(*argv, cwd=place)
    assert code == 0, answer
    return Story(watched, RunFolder(place / "o ü"), dry, answer)


def test_a_run_of_two_ranks_knows_its_places_by_their_whole_names(story: Story) -> None:
    """CA-13."""
    assert (story.answer["status"], story.answer["run_dir"]) == ("succeeded", str(story.folder.path))
    run, rows = story.run, story.watched.folder / "x" / "d ä 1" / "a b.jsonl"
    assert [file["path"] for file in run["data"]["files"]] == [str(rows)]
    assert run["settings"]["out"]["value"] == str(story.folder.path)
    assert {Path(item["path"]).parent for item in run["outputs"]} == {story.folder.adapter}


@pytest.mark.proof
def test_a_run_of_two_ranks_is_stopped_and_resumed_from_another_folder(tmp_path: Path) -> None:
    """CA-13, CA-06."""
    watched = Watched(tmp_path)
    place, argv = wanted(tmp_path, 30)
    folder = RunFolder(place / "o ü")
    answer, code = watched(*argv, cwd=place, stop_in=folder)
    assert (code, answer["status"], answer["run_dir"]) == (10, "preempted", str(folder.path))
    saved = answer["errors"][0]["evidence"]["step"]
    assert 0 < saved < 30
    answer, code = watched("resume", str(folder.path), cwd=Path("/"))
    assert (code, answer["status"], answer["data"]["resumed_from"]) == (0, "succeeded", saved)
    lines = folder.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 31)]
    attempts = document(folder.manifest, "run")["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["preempted", "succeeded"]


def test_run_json_tells_what_fsdp2_left_on_each_rank(story: Story) -> None:
    parallel = story.run["parallel"]
    assert (parallel["kind"], parallel["world_size"], parallel["num_gpus"]) == ("fsdp2", 2, 2)
    assert parallel["num_dtensors"] > 0
    assert len(parallel["local_parameter_bytes"]) == 2
    for local in parallel["local_parameter_bytes"]:
        assert 0.45 < local / parallel["parameter_bytes"] < 0.55


def test_the_launch_and_its_ranks_are_what_the_dry_run_said(story: Story) -> None:
    """Command line, names of the environment, devices: of the launch and of both ranks.

    Sets, because a process that is being started looks like the one that starts it.
    """
    launch, parallel = story.dry["data"]["launch"], story.dry["data"]["parallel"]
    launches = [one for one in story.watched.seen.values() if one.runs("finetune.launch")]
    assert {tuple(one.argv) for one in launches} == {tuple(launch["argv"])}
    ranks = [one for one in story.watched.seen.values() if one.runs("finetune.rank")]
    places = {(one.argv[0], *one.argv[3:6]) for one in ranks}
    assert places == {(sys.executable, str(story.folder.path), str(number), "2") for number in range(2)}
    for one in launches + ranks:
        assert sorted(one.environ) == launch["environment_names"]
        assert {name: one.environ.get(name) for name in DEVICE_LISTS} == {
            name: os.environ.get(name) for name in DEVICE_LISTS
        }
    assert (parallel["device"], parallel["devices"]) == ("cpu", [])
    for name in ("kind", "num_gpus", "device", "devices", "profile", "engines"):
        assert story.run["parallel"][name] == parallel[name]


def test_no_command_line_of_a_run_holds_a_secret(story: Story) -> None:
    """SE-03."""
    assert len({pid for pid, _ in story.watched.seen}) >= 5  # the command, its checks, the launch, two ranks
    lines = [line for _, line in story.watched.seen]
    assert not [line for line in lines if any(secret in line for secret in SECRETS.values())]


def test_nothing_of_a_run_is_open_to_more_than_the_umask_leaves(story: Story) -> None:
    """SE-11: for group and others, of the run folder, the home and the cache."""
    places = [story.folder.path, *(story.watched.folder / name for name in ("home", "cache"))]
    made = [path for place in places for path in (place, *place.rglob("*")) if not path.is_symlink()]
    assert len(made) > 20
    assert {str(path): oct(path.stat().st_mode) for path in made if path.stat().st_mode & UMASK} == {}
