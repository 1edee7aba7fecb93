"""How every figure looks: theme, one colour and marker for each setting, title, legend and small print,
saving.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from latency_lab import files, metrics

WIDTH_IN = 7.2
FONT_PT = 9
RANDOM = "they time the same kernels as real ones and speak no sense"
DPI = 200  # laid out as it is saved: letters measure differently at other resolutions

# seaborn's colour-blind-safe palette without the pale pink and yellow, which vanish on white, and without the
# grey, which stands for "not the point of this figure".
_COLOURS = [c for i, c in enumerate(sns.color_palette("colorblind", 10).as_hex()) if i not in (6, 7, 8)]
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))

_THEME = {
    "font.size": FONT_PT,
    "axes.labelsize": FONT_PT,
    "axes.titlesize": FONT_PT,
    "xtick.labelsize": FONT_PT,
    "ytick.labelsize": FONT_PT,
    "legend.fontsize": FONT_PT,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#888888",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "xtick.bottom": True,
    "ytick.left": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    # svg: ids from a fixed salt, so that an unchanged figure is an unchanged file
    "svg.hashsalt": "latency-lab",
}

_KEY: dict[str, float] = {"handlelength": 2.6, "handletextpad": 0.8, "columnspacing": 2.0}
"""Spacing of a legend, in font sizes."""


@dataclass(frozen=True)
class Look:
    """How one setting is drawn. Colours repeat after 7 settings, markers after 6, so pairs after 42."""

    colour: str
    marker: str
    dash: Any


@dataclass(frozen=True)
class Context:
    """What all figures of a study share: the look of each setting and the small print on where the data is
    from.
    """

    looks: dict[str, Look]
    small_print: str


@dataclass(frozen=True)
class Drawn:
    """A figure, the table that holds exactly what it shows, and its alternative text.

    Where the study lacks what the figure needs, `figure` is None and `reason` is a sentence that says why.
    """

    figure: Figure | None
    data: pd.DataFrame
    alt: str = ""
    reason: str = ""


def context(cells: pd.DataFrame) -> Context:
    """Looks for all settings of a study, in the order of the numbers in their labels; unmeasured ones last."""
    measured = cells.groupby("setting")["requests"].sum()
    labels = sorted(measured.index, key=lambda label: (measured[label] == 0, metrics.natural_key(label)))
    looks = {
        label: Look(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)])
        for i, label in enumerate(labels)
    }
    weights = _joined(cells["weights"])
    parts = [
        f"{_joined(cells['model'])}, {weights} weights" + f" ({RANDOM})" * ("random" in weights),
        _joined(cells["device"]),
        f"vLLM {_joined(cells['vllm_version'])}",
    ]
    return Context(looks, "; ".join(parts))


def theme() -> Any:
    """A context manager with the study's matplotlib settings."""
    return mpl.rc_context({**sns.axes_style("whitegrid"), **_THEME})


def figure(height_in: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure of the study's width and its axes as a 2-D array; `finish` adds the text around."""
    made = Figure(figsize=(WIDTH_IN, height_in), layout="constrained", dpi=DPI)
    return made, made.subplots(rows, columns, squeeze=False, **options)


def finish(made: Figure, title: str, small_print: str, legend: tuple[Sequence[Any], Sequence[str]] = ((), ())) -> None:
    """Put the title above and the legend and the small print below the axes, which keep their size, and lay all out.

    What is put on the axes afterwards has no room made for it.
    """
    for axes in made.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    text: dict[str, Any] = {"x": 0.012, "ha": "left", "linespacing": 1.25}
    heading = made.text(s=title, y=1, va="top", fontsize=11, fontweight="bold", **text)
    notes = made.text(s=small_print, y=0, va="bottom", fontsize=FONT_PT, color="#555555", **text)
    _wrap(heading, made)
    _wrap(notes, made)
    handles, labels = legend
    key = None
    if handles:
        columns = _columns(labels, made.get_figwidth())
        key = made.legend(handles, labels, loc="lower left", ncols=columns, frameon=False, **_KEY)
    pad = 0.07
    inches = [part.get_window_extent().height / made.dpi if part else 0 for part in (heading, key, notes)]
    top, bottom = inches[0] + 2 * pad, inches[1] + inches[2] + 3 * pad
    body = made.get_figheight()
    height = body + top + bottom
    made.set_figheight(height)
    heading.set_y(1 - pad / height)
    notes.set_y(pad / height)
    if key:
        key.set_bbox_to_anchor((0, (inches[2] + 1.5 * pad) / height), transform=made.transFigure)
    engine: Any = made.get_layout_engine()
    engine.set(rect=(0.005, bottom / height, 0.99, body / height), w_pad=0.05, h_pad=0.05)
    # Once for all formats, and for what is placed by pixels: finding the axes' places takes longer than drawing them.
    engine.execute(made)
    made.set_layout_engine(None)


def save(drawn: Drawn, name: str, folder: Path) -> list[Path]:
    """Write <name>.png, .svg and .csv (the data drawn) into `folder`; the same data gives the same bytes.

    Where there is no figure, files of an earlier run are removed, so that nothing stale stays. Returns the
    files.
    """
    paths = [folder / f"{name}.{end}" for end in ("png", "svg", "csv")]
    if drawn.figure is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return []
    # without a date or a version inside, so that an unchanged figure is an unchanged file
    files.write_bytes(_bytes(drawn.figure, "png", {"Software": None}), paths[0])
    files.write_bytes(_bytes(drawn.figure, "svg", {"Date": None, "Creator": None}), paths[1])
    files.write_text(drawn.data.to_csv(index=False, float_format="%.6g"), paths[2])
    return paths


def show(drawn: Drawn, name: str, folder: Path) -> Any:
    """Save the figure and return what a notebook displays: the picture with its alternative text, or the
    reason.
    """
    from IPython.display import HTML

    paths = save(drawn, name, folder)
    if drawn.figure is None:
        return HTML(f'<p class="absent">Not drawn: {html.escape(drawn.reason)}</p>')
    data = base64.b64encode(paths[0].read_bytes()).decode()
    width = round(drawn.figure.get_figwidth() * 100)
    alt = html.escape(drawn.alt, quote=True)
    image = f'<img class="figure" src="data:image/png;base64,{data}" alt="{alt}" width="{width}">'
    return HTML(f'<div class="picture" tabindex="0">{image}</div>')


def _bytes(made: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    with theme():
        made.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def _joined(column: Iterable[Any]) -> str:
    values = sorted({str(value) for value in column if pd.notna(value)})
    return ", ".join(values) if values else "unknown"


def _wrap(text: Any, made: Figure) -> None:
    """Break a text's lines where the next word would not fit the figure as drawn: letters differ in width."""
    font, most_in = text.get_fontproperties(), 0.976 * made.get_figwidth()
    space_in = _width_in(" ", font)
    lines: list[list[str]] = [[]]
    used_in = 0.0
    for word in text.get_text().split():
        word_in = _width_in(word, font)
        if lines[-1] and used_in + space_in + word_in > most_in:
            lines.append([])
        used_in = used_in + space_in + word_in if lines[-1] else word_in
        lines[-1].append(word)
    text.set_text("\n".join(" ".join(line) for line in lines))


def _columns(labels: Sequence[str], width_in: float) -> int:
    """As many columns of a legend as fit beside one another, each as wide as its longest label."""
    em_in = FONT_PT / 72
    handle_in = (_KEY["handlelength"] + _KEY["handletextpad"]) * em_in
    each = [handle_in + _width_in(label, FontProperties(size=FONT_PT)) for label in labels]
    for columns in range(len(labels), 1, -1):
        widths = [max(part) for part in np.array_split(each, columns)]  # as matplotlib deals labels to columns
        if sum(widths) + (columns - 1) * _KEY["columnspacing"] * em_in < 0.96 * width_in:
            return columns
    return 1


@cache
def _width_in(line: str, font: FontProperties) -> float:
    """Width of a line of text in inches. Words come again and again: in the small print of every figure."""
    width, _, _ = _ruler().get_text_width_height_descent(line, font, ismath=False)
    return width / DPI


@cache
def _ruler() -> RendererAgg:
    """Measures text without a figure to draw it on."""
    return RendererAgg(1, 1, DPI)
