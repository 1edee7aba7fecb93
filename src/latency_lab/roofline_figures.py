"""Figures of predictions: against what was measured, what bounds a step, what a GPU that was not measured would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from latency_lab import gpus, outlook, panels, style
from latency_lab.recommend import Oracle
from latency_lab.style import Drawn

FORMATS = {
    "bf16": ("#0173b2", "o", "-"),
    "fp8": ("#d55e00", "s", (0, (5, 1.5))),
    "int4": ("#029e73", "^", (0, (1.5, 1.2))),
}
"""Colour, marker and dash of each format of weights."""
PARTS = {
    "overhead": ("#4d4d4d", ""),
    "weights": ("#5b8db8", "////"),
    "KV cache": ("#e1a95f", "...."),
    "compute": ("#d9d9d9", ""),
}
"""Colour and hatch of what a step's time goes to."""
SOURCES = {
    "fitted": ("#8c8c8c", "o"),
    "held out": ("#0173b2", "s"),
    "published": ("#d55e00", "^"),
    "published, older kernel": ("#d55e00", "x"),
}
PREDICTED = "Predicted, not measured"
NO_GPU = "no GPU was measured here whose costs could be carried over to another."
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_UNITS = {"ttft": ("s", 1.0), "tpot": ("ms", 1e3), "e2e": ("s", 1.0)}


def against_measured(points: pd.DataFrame, published: pd.DataFrame | None) -> Drawn:
    """Each predicted median against the measured one: fitted, held out, and published by others for other GPUs.

    published : of published.check; None where no GPU was measured whose costs could be carried over
    """
    if points.empty:
        return Drawn(None, pd.DataFrame(), reason="no machine was measured with a study that the fit knows.")
    own = points.assign(source=np.where(points["fitted"], "fitted", "held out"))
    own["what"] = own["setting"] + ", " + own["workload"]
    columns = ["metric", "source", "device", "what", "measured_s", "predicted_s", "error"]
    parts = [own[columns]]
    if published is not None:
        source = np.where(published["old_kernel"], "published, older kernel", "published")
        other = published.assign(source=source, device=published["gpu"])
        other["what"] = other["model"] + " " + other["weights"] + " c=" + other["concurrency"].astype(str)
        parts.append(other[columns])
    data = pd.concat(parts, ignore_index=True)
    data["ratio"] = data["error"] + 1
    # The last is a GPU if any is.
    machines = sorted(points["device"].unique(), key=lambda name: ("16-bit" in gpus.find(name).flops, name))
    with style.theme():
        made, axes = style.figure(2.6, 1, 3, sharey=True)
        for ax, metric in zip(axes[0], _NAMES, strict=True):
            for factor, dash in ((1.0, "-"), (1.1, "--"), (1.25, ":")):
                for at in (factor, 1 / factor):
                    ax.axhline(at, color="#888888", lw=0.8, ls=dash, zorder=1)
            for (kind, device), some in data[data["metric"] == metric].groupby(["source", "device"], sort=True):
                colour, marker = SOURCES[str(kind)]
                face = "white" if kind in ("fitted", "held out") and device != machines[-1] else colour
                measured = some["measured_s"] * _UNITS[metric][1]
                ax.plot(measured, some["ratio"], marker, ms=4, color=colour, mfc=face, mew=0.8, zorder=3)
            ax.set(xscale="log", yscale="log", xlabel=f"measured {_NAMES[metric]} ({_UNITS[metric][0]})")
            panels.plain_log(ax.xaxis)
            panels.plain_log(ax.yaxis)
        axes[0, 0].set_ylabel("predicted / measured")
        held = data[data["source"].eq("held out") & data["device"].eq(machines[-1])]
        errors = held["error"].abs().groupby(held["metric"]).median()
        said = ", ".join(f"{_NAMES[m]} {100 * errors[m]:.1f} %" for m in ("tpot", "e2e", "ttft") if m in errors)
        title = f"Held out on the {machines[-1].removeprefix('NVIDIA ')}, median error: {said or 'no such points'}"
        names = [source for source in SOURCES if (data["source"] == source).any()]
        keys: list[Any] = [Line2D([], [], color=c, marker=m, ls="", ms=5) for c, m in (SOURCES[name] for name in names)]
        if len(machines) > 1:
            keys.append(Line2D([], [], color="#444444", mfc="white", marker="o", ls="", ms=5))
            names.append(f"hollow: {', '.join(machines[:-1])}")
        keys += [Line2D([], [], color="#888888", lw=0.8, ls="--"), Line2D([], [], color="#888888", lw=0.8, ls=":")]
        note = "A mark: the median of a workload point over all repeats"
        note += "." if published is None else ", or a rate published for another GPU."
        style.finish(made, title, note, (keys, [*names, "10 %", "25 %"]))
    alt = f"Predicted against measured TTFT, TPOT and E2E of {len(data)} points, fitted, held out and published."
    return Drawn(made, data.reset_index(drop=True), alt)


def step_bounds(oracles: Sequence[Oracle | None]) -> Drawn:
    """What the time of a decode step goes to over its batch, GPU by GPU, in the widest and the narrowest format of
    weights that was fitted.
    """
    held = [oracle for oracle in oracles if oracle is not None]
    if not held:
        return Drawn(None, pd.DataFrame(), reason=NO_GPU)
    fitted = [one for one in FORMATS if one in held[0].fit.costs.kernel_s]
    weights = fitted if len(fitted) < 2 else [fitted[0], fitted[-1]]
    parts = [outlook.bounds(oracle, one).assign(gpu=oracle.gpu.name, weights=one) for oracle in held for one in weights]
    data = pd.concat(parts, ignore_index=True)[["gpu", "weights", "batch", "part", "seconds"]]
    with style.theme():
        made, axes = style.figure(2.3 * len(held), len(held), len(weights), sharey="row", sharex=True)
        for row, oracle in zip(axes, held, strict=True):
            for ax, one in zip(row, weights, strict=True):
                own = data[(data["gpu"] == oracle.gpu.name) & (data["weights"] == one)]
                table = own.pivot(index="batch", columns="part", values="seconds")
                at, left = np.arange(len(table)), np.zeros(len(table))
                for part, (colour, hatch) in PARTS.items():
                    height = 1e3 * table[part].to_numpy()
                    ax.bar(at, height, bottom=left, color=colour, hatch=hatch, edgecolor="white", lw=0.4, width=0.72)
                    left = left + height
                for x, total in zip(at, left, strict=True):
                    ax.annotate(panels.three(total), (x, total), xytext=(0, 2), textcoords="offset points", ha="center")
                ax.set_xticks(at, [str(batch) for batch in table.index])
                ax.set_title(f"{oracle.gpu.name}, {one} weights")
                ax.grid(False, axis="x")
            row[0].set_ylabel("decode step (ms)")
            row[0].set_ylim(0, row[0].get_ylim()[1] * 1.08)
        for ax in axes[-1]:
            ax.set_xlabel("requests in the step")
        first, last = held[0].gpu.name, held[-1].gpu.name
        lone = data[(data["batch"] == 1) & (data["weights"] == weights[0])]
        times = lone.pivot(index="gpu", columns="part", values="seconds")
        share = (100 * times["overhead"] / times.sum(axis=1)).to_dict()
        said = f"{share[first]:.0f} % of a step on the {first}, {share[last]:.0f} % on the {last}"
        title = f"A request alone in {weights[0]}: overhead is {said}"
        keys = [Patch(facecolor=colour, hatch=hatch, edgecolor="white") for colour, hatch in PARTS.values()]
        note = f"{held[0].shape.name}, {outlook.CONTEXT} tokens of context a request. {first}: as fitted to its steps. "
        note += f"{last}: {PREDICTED.lower()}."
        style.finish(made, title, note, (keys, list(PARTS)))
    return Drawn(made, data, f"Stacked bars of a decode step's time over the batch for {first} and {last}.")


def e2e_curves(oracle: Oracle | None, outputs: Sequence[int] = (64, 256)) -> Drawn:
    """E2E over concurrency for each format of weights on a GPU that was not measured, with bands, and the thread's."""
    if oracle is None:
        return Drawn(None, pd.DataFrame(), reason=NO_GPU)
    data = outlook.e2e(oracle, outputs)
    with style.theme():
        made, axes = style.figure(2.9, 1, len(outputs), sharey=True)
        for ax, tokens in zip(axes[0], outputs, strict=True):
            for weights, own in data[data["output_tokens"] == tokens].groupby("weights", sort=False):
                colour, marker, dash = FORMATS[str(weights)]
                ax.fill_between(own["concurrency"], own["e2e_s_low"], own["e2e_s_high"], color=colour, alpha=0.15, lw=0)
                ax.plot(own["concurrency"], own["e2e_s"], color=colour, marker=marker, ls=dash, ms=4)
            ax.axhline(1.0, color="#222222", lw=1, ls="--")
            if tokens == outlook.THREAD["output_tokens"]:
                for name, face in (("e2e_s", "#222222"), ("e2e_not_streaming_s", "white")):
                    ax.plot(
                        [outlook.THREAD["requests"]],
                        [outlook.THREAD[name]],
                        marker="*",
                        ms=9,
                        color="#222222",
                        mfc=face,
                        ls="",
                    )
            ax.set(xscale="log", yscale="log", xlabel="concurrent requests")
            _concurrency(ax)
            ax.set_title(f"{tokens} output tokens")
            panels.plain_log(ax.yaxis)
        axes[0, 0].set_ylabel("median E2E (s)")
        row = data[data["output_tokens"].eq(outputs[-1]) & data["concurrency"].eq(outlook.THREAD["requests"])]
        said = ", ".join(f"{panels.three(v)} ({w})" for w, v in zip(row["weights"], row["e2e_s"], strict=True))
        title = f"{oracle.gpu.name}, predicted: {outputs[-1]} tokens, {outlook.THREAD['requests']} at once, in {said} s"
        keys, names = _formats(data)
        keys += [Line2D([], [], color="#222222", marker="*", ls="", ms=9, mfc=face) for face in ("#222222", "white")]
        keys.append(Line2D([], [], color="#222222", ls="--"))
        note = f"{PREDICTED}; bands: errors of such predictions on published rates. {_load(oracle, data)}"
        names += ["the thread's, streaming", "the thread's, not streaming", "1 s"]
        style.finish(made, title, note, (keys, names))
    return Drawn(
        made,
        data,
        f"Predicted E2E over concurrency on the {oracle.gpu.name} for {', '.join(data['weights'].unique())}.",
    )


def longest_outputs(oracle: Oracle | None) -> Drawn:
    """The largest output that is answered within a second over concurrency, for each format of weights."""
    if oracle is None:
        return Drawn(None, pd.DataFrame(), reason=NO_GPU)
    table = outlook.longest(oracle)
    with style.theme():
        made, axes = style.figure(2.6, 1, 1)
        ax = axes[0, 0]
        for weights, own in table.groupby("weights", sort=False):
            colour, marker, dash = FORMATS[str(weights)]
            ax.plot(own["concurrency"], own["tokens"], color=colour, marker=marker, ls=dash)
            ax.plot(own["concurrency"], own["sure"], color=colour, marker=marker, ls=":", mfc="white", lw=1)
        ax.set(xscale="log", xlabel="concurrent requests", ylabel="output tokens", ylim=(0, None))
        _concurrency(ax)
        at = table[table["concurrency"] == outlook.THREAD["requests"]]
        said = ", ".join(f"{n} ({w})" for w, n in zip(at["weights"], at["tokens"], strict=True))
        title = f"{oracle.gpu.name}, predicted: {outlook.THREAD['requests']} at once get {said} tokens in 1 s"
        keys, names = _formats(table)
        keys.append(Line2D([], [], color="#444444", mfc="white", marker="o", ls=":"))
        names.append("even at the band's upper end")
        note = f"{PREDICTED}. p95 of E2E under 1 s. {_load(oracle, table)}"
        style.finish(made, title, note, (keys, names))
    return Drawn(made, table, f"Largest output within a second over concurrency on the {oracle.gpu.name}, predicted.")


def goodput_over_rate(oracle: Oracle | None, slo: Mapping[str, float]) -> Drawn:
    """Requests a second within the SLO over requests a second sent, for each format of weights; predicted."""
    if oracle is None:
        return Drawn(None, pd.DataFrame(), reason=NO_GPU)
    table = outlook.goodput_over_rate(oracle, slo)
    with style.theme():
        made, axes = style.figure(2.7, 1, 1)
        ax = axes[0, 0]
        top = table["rate_per_s"].max()
        ax.plot([0, top], [0, top], color="#888888", lw=0.8, zorder=1)
        for weights, own in table.groupby("weights", sort=False):
            colour, marker, dash = FORMATS[str(weights)]
            ax.fill_between(own["rate_per_s"], own["low"], own["high"], color=colour, alpha=0.15, lw=0)
            ax.plot(own["rate_per_s"], own["goodput_per_s"], color=colour, marker=marker, ls=dash, ms=4, clip_on=False)
        ax.set(xlabel="requests sent a second (Poisson)", ylabel="goodput (requests/s)")
        ax.set(xlim=(0, 1.02 * top), ylim=(0, 1.02 * top))
        best = table.groupby("weights", sort=False)["goodput_per_s"].max()
        said = ", ".join(f"{panels.three(value)} ({weights!s})" for weights, value in best.items())
        keys, names = _formats(table)
        keys.append(Line2D([], [], color="#888888", lw=0.8))
        names.append("all that is sent")
        limits = ", ".join(f"{name.replace('_', ' ')} < {panels.seconds(limit)}" for name, limit in slo.items())
        tokens = table["output_tokens"].iloc[0]
        note = f"{PREDICTED}; band: with the ends of each latency's band. {limits}; prompts of {outlook.PROMPT_TOKENS} "
        note += f"tokens, outputs of {tokens}. {oracle.unfitted(best.index)}"
        title = f"{oracle.gpu.name}, predicted: goodput reaches {said} requests/s"
        style.finish(made, title, note, (keys, names))
    return Drawn(made, table, f"Predicted goodput over arrival rate on the {oracle.gpu.name}.")


def _concurrency(ax: Any) -> None:
    """Ticks at the levels, without 16, whose label would run into that of 20."""
    shown = [level for level in outlook.CONCURRENCY if level != 16]
    ax.set_xticks(shown, [str(level) for level in shown])
    ax.minorticks_off()


def _load(oracle: Oracle, table: pd.DataFrame) -> str:
    load = f"{oracle.shape.name}, prompts of {outlook.PROMPT_TOKENS} tokens, closed loop."
    return f"{load} {oracle.unfitted(table['weights'].unique())}"


def _formats(table: pd.DataFrame) -> tuple[list[Any], list[str]]:
    """Legend of the formats of weights that a table holds."""
    held = list(table["weights"].unique())
    keys = [Line2D([], [], color=c, marker=m, ls=d) for c, m, d in (FORMATS[weights] for weights in held)]
    return list(keys), [f"{weights} weights" for weights in held]
