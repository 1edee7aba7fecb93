"""What every figure has to hold, whatever it shows."""

from matplotlib.figure import Figure
from matplotlib.text import Text

from latency_lab import style


def assert_readable(made: Figure) -> None:
    """No text is cut off at the figure's edge or too small to read."""
    with style.theme():  # as it is saved: the number of ticks depends on the size of their labels
        made.draw_without_rendering()
    width, height = made.get_size_inches() * made.dpi
    assert made.get_figwidth() == style.WIDTH_IN
    beside = [text for ax in made.axes for text in (*ax.get_children(), ax.xaxis.label, ax.yaxis.label)]
    texts = [text for text in (*made.texts, *beside) if isinstance(text, Text) and text.get_text()]
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, (
            f"{text.get_text()} {box} {width} x {height}"
        )
        assert text.get_fontsize() >= 9, text.get_text()
    ticks = [text for ax in made.axes for text in (*ax.get_xticklabels(), *ax.get_yticklabels())]
    assert min(text.get_fontsize() for text in ticks if text.get_text()) >= 9
