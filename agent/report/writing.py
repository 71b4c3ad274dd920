"""Writing reports: a page and a picture beside each run, one more page where several runs are compared.

The same run folder gives the same bytes. A file that is no report of ours is never written over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agent.environment import secret_values
from agent.folder import RunFolder
from agent.manifest import file_digest
from agent.render import Answer
from agent.report.curves import charts_of, compared
from agent.report.page import GENERATOR, comparison_page, run_page, safe
from agent.report.picture import SOFTWARE, picture
from agent.report.reading import RunRecord, read_run
from agent.system import Machine
from finetune.errors import FinetuneError, Problems
from finetune.records import write_atomically

PAGE, COMPARISON = "report.html", "comparison.html"
_MOST_HEAD = 2000  # bytes in which the mark of ours stands


@dataclass
class _Written:
    """What has been written so far."""

    artifacts: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)

    def page(self, kind: str, path: Path, text: str) -> None:
        write_atomically(path, text)
        self.artifacts.append({"kind": kind, "path": str(path), "sha256": file_digest(path)})

    def picture(self, path: Path, title: str, charts: list[dict[str, Any]]) -> None:
        """Draw the main curves; without a package that can draw them a warning says so, and an old picture goes."""
        main = [chart for chart in charts if chart["main"]]
        try:
            content = picture(title, main)
        except FinetuneError as error:
            self.warnings.append((error.code, error.message))
            path.unlink(missing_ok=True)
            return
        write_atomically(path, content)
        self.artifacts.append({"kind": "picture", "path": str(path), "sha256": file_digest(path)})


def write_reports(folders: Sequence[RunFolder], out: Path | None, machine: Machine) -> Answer:
    """Write RUN/report.html and report.png for each run; several runs are compared in a page of their own too.

    out: another place for the page of one run, or for the comparison (default: comparison.html in the first run's
    folder). Raises FinetuneError: run_missing, bad_value for a name that is no page's; Problems(target_exists).
    """
    distinct = list({os.path.realpath(folder.path): folder for folder in folders}.values())
    if out is not None and out.suffix != ".html":
        raise FinetuneError("bad_value", f"out: {out.name} must end in .html", setting="out")
    runs = [read_run(folder, machine.host) for folder in distinct]
    is_comparison = len(runs) > 1
    own = [run.folder.path / PAGE for run in runs] if is_comparison or out is None else [out]
    shared = [out or runs[0].folder.path / COMPARISON] if is_comparison else []
    _check_targets([path.with_suffix(end) for path in (*own, *shared) for end in (".html", ".png")])
    secrets, written = secret_values(machine.environ), _Written()
    shown = []
    for run, path in zip(runs, own, strict=True):
        text, rollouts = run_page(run, secrets)
        written.page("report", path, text)
        written.picture(
            path.with_suffix(".png"), safe(f"{run.name}: {run.status}", secrets), _charts(run, secrets)
        )
        shown.append(
            {
                "run_id": run.name,
                "run_dir": str(run.folder.path),
                "status": run.status,
                "report": str(path),
                "rollouts": rollouts,
            }
        )
    for path in shared:
        labels = labels_of(runs)
        links = [quote(os.path.relpath(one, path.parent)) for one in own]
        written.page("comparison", path, comparison_page(runs, labels, links, secrets))
        written.picture(path.with_suffix(".png"), f"{len(runs)} runs", safe(compared(runs, labels), secrets))
    return Answer(
        "report",
        "done",
        f"{len(runs)} runs are compared in {shared[0]}" if shared else f"{own[0]} shows the run ({runs[0].status})",
        run_id=None if is_comparison else runs[0].name,
        run_dir=None if is_comparison else runs[0].folder.path,
        data={"runs": shown},
        warnings=written.warnings,
        artifacts=written.artifacts,
    )  # fmt: skip


def _charts(run: RunRecord, secrets: Sequence[str]) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = safe(charts_of(run), secrets)
    return charts


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return a short name for each run: its folder's, with the parent folder's where two are equal, else its id."""
    for names in (
        [run.folder.path.name for run in runs],
        [f"{run.folder.path.parent.name}/{run.folder.path.name}" for run in runs],
        [str(run.folder.path) for run in runs],
    ):
        if len(set(names)) == len(names):
            break
    return names


def _check_targets(paths: Sequence[Path]) -> None:
    """Refuse to write over anything but our own pages and pictures; every such file is named at once."""
    foreign = [path for path in paths if not _is_ours(path)]
    if foreign:
        raise Problems(
            [
                FinetuneError("target_exists", f"out: {path} exists and is no report of ours", setting="out")
                for path in foreign
            ]
        )


def _is_ours(path: Path) -> bool:
    """Whether a path is free, or holds what a report has written there."""
    try:
        with open(path, "rb") as file:
            head = file.read(_MOST_HEAD)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False
    mark = f'content="{GENERATOR}"' if path.suffix == ".html" else SOFTWARE
    return mark.encode() in head
