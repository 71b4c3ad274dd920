"""Report pages: one HTML file each with style, script and data inside, so that it opens from a disk without a network.

Rule: text of rows, models and logs never becomes markup or code. It is masked, made visible and escaped, and the page
allows no script but its own, by digest.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.environment import scrub_text
from agent.report.curves import charts_of, compared
from agent.report.figures import figures, held_out_of, moment
from agent.report.reading import RunRecord, error_of, warnings_of
from agent.report.rollouts import examples_of, rollouts_of
from agent.report.tables import (
    artifacts_of,
    attempts_of,
    comparison,
    data_of,
    differences,
    environment_of,
    events_of,
    settings_of,
)

GENERATOR = "finetune report"
_TEMPLATES = Path(__file__).with_name("templates")
_SCRIPTS = ("charts.js", "rollouts.js", "page.js")
# Control codes but tab and line feed, lone surrogates, marks that reorder text, and what no eye sees.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
_LITERAL = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def run_page(run: RunRecord, secrets: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the page of a run, and what of its rollouts stands in it."""
    rollouts = rollouts_of(run.folder.path / "rollouts", secrets)
    shown = {"num_shown": len(rollouts["steps"]), **_without(rollouts, "steps")}
    context = {
        "title": run.name,
        "run": {"name": run.name, "method": run.method, "status": run.status, "model": run.model.get("id")},
        "as_of": moment(run.state.get("heartbeat") or run.manifest.get("ended")),
        "figures": figures(run),
        "error": error_of(run),
        "warnings": warnings_of(run),
        "held_out": held_out_of(run),
        "examples": examples_of(run.folder.path / "rollouts", secrets),
        "data": data_of(run),
        "attempts": attempts_of(run),
        "events": events_of(run),
        "artifacts": artifacts_of(run),
        "settings": settings_of(run),
        "environment": environment_of(run),
        "rollouts": shown,
    }
    resumes = [event.get("step") for event in run.events_of("resumed")]
    settings = run.settings
    limits = {
        name: (settings.get(name) or {}).get("value") for name in ("correction", "correction_cap", "beta")
    }
    payload = {
        "charts": charts_of(run),
        "resumes": resumes,
        "rollouts": {"steps": rollouts["steps"], "limits": limits},
    }
    return _page("run.html", context, payload, secrets), shown


def comparison_page(
    runs: Sequence[RunRecord], labels: Sequence[str], links: Sequence[str], secrets: Sequence[str]
) -> str:
    """Return the page that puts runs side by side. links: of each run's own page, relative to this one."""
    context = {
        "title": f"{len(runs)} runs",
        "runs": [
            {"label": label, "name": run.name, "link": link}
            for run, label, link in zip(runs, labels, links, strict=True)
        ],
        "comparison": comparison(runs),
        "lifts": lift_bars([held_out_of(run)["lift"] for run in runs], labels),
        "settings": differences(runs, "settings"),
        "packages": differences(runs, "packages"),
    }
    payload = {"charts": compared(runs, labels), "resumes": []}
    return _page("comparison.html", context, payload, secrets)


def lift_bars(lifts: Sequence[dict[str, Any] | None], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return where on a common axis, in percent of its width, each lift, the ends of its interval, and 0 stand."""
    known = [
        (label, lift)
        for label, lift in zip(labels, lifts, strict=True)
        if lift is not None and lift["numbers"] is not None
    ]
    if not known:
        return []
    every = [0.0, *(value for _, lift in known for value in lift["numbers"].values())]
    least, most = min(every), max(every)
    spread = (most - least) or 1.0

    def at(value: float) -> float:
        return round(4 + 92 * (value - least) / spread, 2)

    return [
        {
            "label": label,
            "of": lift["of"],
            "text": f"{lift['mean']} ({lift['interval']})",
            "zero": at(0.0),
            **{name: at(value) for name, value in lift["numbers"].items()},
        }
        for label, lift in known
    ]


def _without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in names}


def _page(template: str, context: dict[str, Any], payload: dict[str, Any], secrets: Sequence[str]) -> str:
    from markupsafe import Markup  # here as jinja2 below: other verbs shall not wait for it

    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    script = "".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    text = json.dumps(safe(payload, secrets), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    ours = {
        "generator": GENERATOR,
        "style": Markup(style),
        "script": Markup(script),
        "style_digest": _digest(style),
        "script_digest": _digest(script),
        "payload": Markup(text.translate(_LITERAL)),
    }
    return _environment().get_template(template).render({**safe(context, secrets), **ours})


@functools.cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _digest(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows this text alone."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def safe(value: Any, secrets: Sequence[str]) -> Any:
    """Return a value for a page: texts masked and with what is unseen made visible, numbers finite, keys as texts."""
    if isinstance(value, str):
        return visible(scrub_text(value, list(secrets)))
    if isinstance(value, dict):
        return {safe(str(name), secrets): safe(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [safe(item, secrets) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def visible(text: str) -> str:
    """Return a text in which every control code, bidirectional mark and unseen character stands as its number."""
    text = text.replace("\r\n", "\n")
    return _UNSEEN.sub(lambda found: f"\u27e8U+{ord(found[0]):04X}\u27e9", text)
