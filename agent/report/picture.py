"""The main curves of a report as one PNG, for readers that show pictures but no pages; drawn by matplotlib.

The same curves give the same bytes.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from typing import Any

from finetune.errors import FinetuneError, boundary

SOFTWARE = "finetune report"
_COLUMNS = 3
_MOST_LINES = 10


def picture(title: str, charts: list[dict[str, Any]]) -> bytes:
    """Return a PNG of the charts (see curves.charts_of).

    Raises FinetuneError: missing_package without matplotlib, broken_package where it cannot draw.
    """
    try:
        import matplotlib
    except ImportError as error:
        text = "the curves are not drawn as a PNG: matplotlib is not installed: pip install 'finetune-skills[report]'"
        raise FinetuneError("missing_package", text, package="matplotlib") from error
    with boundary("broken_package", "the curves are not drawn as a PNG: matplotlib"):
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with warnings.catch_warnings(), matplotlib.rc_context(matplotlib.rcParamsDefault):
            warnings.simplefilter("ignore")  # a character that no font has is drawn as a box
            return _drawn(title, charts)


def _drawn(title: str, charts: list[dict[str, Any]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, max(1, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    width, height = 5.2 * columns, 3.2 * rows + 0.5
    # Margins in inches: a layout that matplotlib works out costs as much as all the rest.
    figure = Figure(figsize=(width, height), dpi=100)
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.25 / width,
        bottom=0.55 / height,
        top=1 - 0.95 / height,
        wspace=0.28,
        hspace=0.45,
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, parse_math=False, y=1 - 0.25 / height)
    for place, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, columns, place + 1), chart)
    if not charts:
        figure.text(0.5, 0.5, "no step has been logged yet", ha="center")
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": SOFTWARE})
    return file.getvalue()


def _draw(axes: Any, chart: dict[str, Any]) -> None:
    handles, labels = [], []
    for line in chart["lines"][:_MOST_LINES]:
        steps = [point[0] for point in line["points"]]
        values = [math.nan if point[1] is None else point[1] for point in line["points"]]
        marker = "o" if line["sparse"] or len(steps) == 1 else None
        (handle,) = axes.plot(steps, values, linewidth=1.2, marker=marker, markersize=4)
        handles.append(handle)
        labels.append(f" {line['name']}")
    unit = f" ({chart['unit']})" if chart["unit"] else ""
    axes.set_title(chart["title"] + unit, fontsize=10, parse_math=False)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, alpha=0.3)
    if chart["log"]:
        axes.set_yscale("log")
    if len(labels) > 1:
        legend = axes.legend(handles, labels, fontsize=7)
        for text in legend.get_texts():
            text.set_parse_math(False)
