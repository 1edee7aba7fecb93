"""Is a cell that was measured hot the same as one measured cold? What `bench hot` has measured, compared.

The rule, fixed before the measurement: `engine_reuse: hot` is offered where the 95 % intervals of hot and cold overlap
in every metric, on every setting and workload, and where resolved configuration, KV cache and tokens are the same.

The records are a study whose settings are called `<label> hot` and `<label> cold`, and whose repeats are rounds, which
have engine starts of their own: what differs between starts is in the intervals.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from latency_lab import effects, fidelity, metrics, summary
from latency_lab.records import Records

METRICS = [f"{name}_{of}_s" for name in metrics.LATENCIES for of in ("p50", "p90", "p99", "mean")]
METRICS += metrics.RATES


def compare(study: Records) -> pd.DataFrame:
    """One row a setting, workload, class and metric: hot, cold, each with its interval, their ratio with its own.

    `overlap` says whether the two intervals have a value in common. Metrics that a class has too few values for are
    left out.
    """
    points = summary.of_study(study).points
    points[["label", "how"]] = points["setting"].str.rsplit(" ", n=1).to_list()
    rows = []
    for (label, workload, name), pair in points.groupby(["label", "workload", "class_name"], sort=True):
        sides = pair.set_index("how")
        requests = study.requests[study.requests["workload"] == workload]
        for metric in METRICS:
            effect = effects.effect(requests, metric, (f"{label} hot", f"{label} cold"), of_class=str(name))
            if effect.problem:
                continue
            row: dict[str, Any] = {"setting": label, "workload": workload, "class": name, "metric": metric}
            for how in ("cold", "hot"):
                ends = {end: sides.loc[how, f"{metric}_{end}"] for end in ("low", "high")}
                row |= {how: sides.loc[how, metric]} | {f"{how}_{end}": value for end, value in ends.items()}
            row |= {"ratio": effect.value, "low": effect.low, "high": effect.high}
            row["overlap"] = row["hot_low"] <= row["cold_high"] and row["cold_low"] <= row["hot_high"]
            rows.append(row)
    return pd.DataFrame(rows)


def text(study: Records, compared: pd.DataFrame) -> str:
    """The comparison as Markdown: what was measured, what agreed, and a table of the ratios of hot to cold."""
    cells = study.cells
    first, hot = cells.iloc[0], cells[cells["hot"]].iloc[0]
    labels = cells["setting"].str.rsplit(" ", n=1).str[0]
    apart = [
        f"{row['metric']} of {row['class']} in {row['workload']} on {row['setting']}"
        for row in compared[~compared["overlap"]].to_dict("records")
    ]
    beyond = int(((compared["low"] > 1) | (compared["high"] < 1)).sum())
    same = {
        name: "the same" if (cells.groupby(labels)[name].nunique() == 1).all() else "NOT the same" for name in _SAME
    }
    equal, answers = _same_tokens(study)
    lines = [
        f"{first['model']} in {first['dtype']}, vLLM {first['vllm_version']}, {first['device']}, "
        f"{cells['started_at'].min():%Y-%m-%d}: {cells['repeat'].nunique()} rounds, each with one hot engine (started "
        f"with max_num_batched_tokens {hot['started_max_num_batched_tokens']} and max_num_seqs "
        f"{hot['started_max_num_seqs']}) and a cold one for each setting; {len(cells)} cells, "
        f"{cells['requests'].sum():,} requests, {cells['requests_failed'].sum()} failed.",
        "",
        f"- The 95 % intervals of hot and cold overlap in {int(compared['overlap'].sum())} of {len(compared)} metrics"
        f"{'; not in ' + ', '.join(apart) if apart else ''}.",
        f"- Of the {len(compared)} ratios, {beyond} have a 95 % interval that leaves out 1; by chance, about "
        f"{len(compared) / 20:.0f} would.",
        f"- Resolved configuration: {same['resolved_id']}; size of the KV cache: {same['kv_cache_tokens']}.",
        f"- The same tokens in {equal:,} of {answers:,} answers.",
        "",
    ]
    return "\n".join([*lines, *_table(compared)])


_SAME = ("resolved_id", "kv_cache_tokens")


def _table(compared: pd.DataFrame) -> list[str]:
    """A row a metric, a column a setting and class: the ratio with its interval."""
    classes = compared.groupby("workload")["class"].transform("nunique")
    point = compared["workload"].where(classes == 1, compared["workload"] + ", " + compared["class"])
    shown = [fidelity.ratio_text(row["ratio"], row["low"], row["high"]) for row in compared.to_dict("records")]
    wide = compared.assign(column=compared["setting"] + ": " + point, shown=shown)
    wide = wide.pivot(index="metric", columns="column", values="shown").reindex(METRICS).dropna(how="all").fillna("")
    lines = [f"| hot / cold | {' | '.join(wide.columns)} |", "|---" * (len(wide.columns) + 1) + "|"]
    return lines + [f"| {row[0]} | {' | '.join(row[1:])} |" for row in wide.reset_index().to_numpy().tolist()]


def _same_tokens(study: Records) -> tuple[int, int]:
    """Of the requests that both ways were sent, how many were answered with the same tokens; and all of them."""
    requests = study.requests
    label = requests["setting"].str.rsplit(" ", n=1).str[0]
    tokens = pd.Series([str(list(ids)) for ids in requests["token_ids"]], requests.index)
    keys = ["label", "workload", "repeat", "prompt_of", "request"]
    # A round's cells of one point are told apart by their request ids, which both ways share but for the cell.
    table = requests.assign(label=label, tokens=tokens, prompt_of=requests["request_id"].str.rsplit("-", n=1).str[0])
    answers = table.groupby(keys)["tokens"].agg(["size", "nunique"])
    pairs = answers[answers["size"] == 2]
    return int((pairs["nunique"] == 1).sum()), len(pairs)
