"""Labels beside points that neither overlap each other nor leave their axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# Offsets in points, nearest first.
_PLACES = sorted(
    ((dx, dy) for dx in (-60, -30, -14, -7, 0, 7, 14, 30) for dy in range(-90, 91, 9) if dx or dy),
    key=lambda place: abs(place[0]) + abs(place[1]),
)
_NEAR_PX = 8  # about half a marker at style.DPI


def ask(ax: Any, point: tuple[float, float], text: str, colour: str) -> None:
    """Note that `point` (data coordinates) wants a label; `place` finds it a place, or drops it."""
    label = ax.annotate(
        text,
        point,
        xytext=(0, 0),
        textcoords="offset points",
        fontsize=9,
        color=colour,
        zorder=6,
        bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
        arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 0, "shrinkB": 3},
    )
    label.set_gid("label")


def place(made: Figure, axes: Iterable[Any]) -> None:
    """Move each label asked for to the nearest place where it hides no marker and no other label, in a figure that is
    laid out.
    """
    offset_px = made.dpi / 72
    for ax in axes:
        inside = ax.get_window_extent()
        dots, lines = _obstacles(ax)
        taken: list[Bbox] = []
        for label in [text for text in ax.texts if text.get_gid() == "label"]:
            best = None
            size = Text.get_window_extent(label)  # the text alone, without its line; the same in every place
            x, y = ax.transData.transform(label.xy)
            for dx, dy in _PLACES:
                left = x + dx * offset_px - size.width * (1 - np.sign(dx)) / 2
                below = y + dy * offset_px - size.height * (1 - np.sign(dy)) / 2
                box = Bbox.from_bounds(left, below, size.width, size.height)
                if not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1):
                    continue
                cost = (
                    50 * _covered(box, dots)
                    + _covered(box, lines)
                    + 1000 * sum(map(box.overlaps, taken))
                    + (abs(dx) + abs(dy)) / 4
                )
                if best is None or cost < best[0]:
                    best = (cost, dx, dy, box)
            if best is None or best[0] >= 1000:
                label.remove()
                continue
            _, dx, dy, box = best
            label.set_position((dx, dy))
            label.set_ha("right" if dx < 0 else "left" if dx > 0 else "center")
            label.set_va("top" if dy < 0 else "bottom" if dy > 0 else "center")
            taken.append(box)


def _obstacles(ax: Any) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of markers, and of lines sampled every few pixels: what a label had better not cover."""
    dots, lines = [np.empty((0, 2))], [np.empty((0, 2))]
    for line in ax.lines:
        points = ax.transData.transform(np.asarray(line.get_xydata(), float))
        if line.get_marker() not in ("", "None", None):
            dots.append(points)
        if line.get_linestyle() not in ("", "None", None):
            for start, end in zip(points[:-1], points[1:], strict=True):
                steps = np.linspace(0, 1, max(2, int(np.hypot(*(end - start)) / 8)))[:, None]
                lines.append(start + steps * (end - start))
    return np.unique(np.concatenate(dots).round(), axis=0), np.unique(np.concatenate(lines).round(), axis=0)


def _covered(box: Bbox, points: np.ndarray) -> int:
    x, y = points.T
    near = _NEAR_PX
    inside = (x > box.x0 - near) & (x < box.x1 + near) & (y > box.y0 - near) & (y < box.y1 + near)
    return int(inside.sum())
