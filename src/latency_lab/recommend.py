"""Which engine setting to run for a load and its SLOs: measured where there is data, predicted elsewhere, and marked.

Candidates are the formats of weights, token budgets and max_num_seqs that matter. For a GPU that was measured here with
the same model, load and lengths, its measurements stand beside the predictions of what was not measured. A prediction
comes with a band: as wide as predictions of this kind were off elsewhere, on the held-out cells of a GPU that was
measured, on the published rates of others (published.py) for one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import goodput, gpus, metrics, observations, predictions, published, records, shapes
from latency_lab.fitting import Fit
from latency_lab.gpus import Gpu
from latency_lab.panels import seconds
from latency_lab.roofline import Engine, StepTime
from latency_lab.shapes import Shape
from latency_lab.simulate import Load, Run, SimulationError, closed, poisson, simulate

WEIGHTS = ("bf16", "fp8", "int4")
BUDGETS = (512, 2048, 8192)
SEQUENCES = (4, 16, 64, 256)
MEMORY_SHARE = 0.9
"""vLLM's default gpu_memory_utilization."""
ACTIVATIONS = 1.5e9
"""Bytes left for activations, CUDA graphs and the driver, beside weights and KV cache; roughly."""
REQUESTS_EACH = 4
POISSON_S = 30.0
"""How long Poisson arrivals last."""
LONGEST = 1024
"""Output tokens up to which a shorter output that would meet the SLO is sought."""

MEETS = ("yes", "likely", "unlikely", "no")
"""yes, no: with the whole band; likely, unlikely: by the prediction itself, but not with its band."""


class QuestionError(Exception):
    """A question that makes no sense; the message says what is wrong and what is allowed."""


@dataclass(frozen=True)
class Question:
    """What is asked: a model and GPU by name, a load (one of concurrency and rate_per_s), lengths, and limits."""

    model: str
    gpu: str
    slo: Mapping[str, float]
    output_tokens: int
    prompt_tokens: int = 32
    concurrency: int | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """What is recommended.

    candidates : a row a setting, best first: what (measured or predicted), setting, the SLO's statistics with their
        bands (<name>_s, _low, _high), attained, goodput_per_s, output_tokens_per_s, meets, pareto
    command : the best as a line to paste; empty where nothing is likely to meet the SLO
    notes : sentences: what the band is from, what comes closest, what would meet it
    """

    question: Question
    candidates: pd.DataFrame
    command: str
    notes: tuple[str, ...]


def recommend(question: Question, studies: Sequence[records.Records], known: Mapping[str, Fit]) -> Answer:
    """Answer a question from studies and the fits of their machines.

    Raises gpus.GpuError or models.ModelError for names that are not known, QuestionError for what makes no sense.
    """
    _check(question)
    gpu, shape = gpus.find(question.gpu), shapes.shape(question.model)
    oracle = Oracle.of(gpu, shape, studies, known)
    rows = _measured(question, gpu, shape, studies)
    taken = {(row["weights"], row["max_num_batched_tokens"], row["max_num_seqs"]) for row in rows}
    rows += [row for row in _predicted(question, oracle) if row["key"] not in taken]
    if not rows:
        raise QuestionError(f"{question.model} does not fit into the memory of {gpu.name} in any format")
    table = pd.DataFrame(rows).drop(columns="key")
    table["pareto"] = metrics.pareto(table["goodput_per_s"], table["worst"])
    rank = table["meets"].map({meets: number for number, meets in enumerate(MEETS)})
    fails = rank > 1
    order = np.lexsort((table["worst"], np.where(fails, table["worst"], -table["goodput_per_s"]), rank))
    table = table.iloc[order].reset_index(drop=True)
    best = table.iloc[0]
    command = "" if MEETS.index(best["meets"]) > 1 else serve(question, best, gpu, shape)
    notes = [oracle.note]
    if best["weights"] not in ("bf16", "float32"):
        notes.append("Quantized weights change the answers as well: check that they are good enough for you.")
    if unfitted := oracle.unfitted(table["weights"].unique()):
        notes.append(unfitted)
    if not command:
        notes += _what_would(question, best, oracle)
    return Answer(question, table, command, tuple(notes))


@dataclass(frozen=True)
class Oracle:
    """Predictions for a GPU and model: a fit, the GPU that its costs are applied to, and how far they are off.

    bands : by latency, measured over predicted: the least and the most that was seen
    """

    gpu: Gpu
    shape: Shape
    fit: Fit
    bands: Mapping[str, tuple[float, float]]
    note: str

    @classmethod
    def of(cls, gpu: Gpu, shape: Shape, studies: Sequence[records.Records], known: Mapping[str, Fit]) -> Oracle:
        """The oracle of a GPU: by its own fit if it was measured here, else by that of the first GPU that was."""
        own = next((fit for fit in known.values() if fit.gpu.name == gpu.name), None)
        fit = own or next((fit for fit in known.values() if "16-bit" in fit.gpu.flops), None)
        if fit is None:
            raise QuestionError(
                "no GPU was measured here: nothing to predict from; allowed: data/reference as committed"
            )
        if own is not None:
            bands = held_out_bands(studies, own)
            note = f"Bands: 90 % of the errors on cells of the {gpu.name} that were not fitted."
        else:
            bands = published_bands(fit)
            note = (
                f"No {gpu.name} was measured here: costs fitted on the {fit.gpu.name}, bandwidth and FLOP/s of the "
                f"{gpu.name}. Bands: errors of such predictions on rates published for other GPUs."
            )
        return cls(gpu, shape, fit, bands, note)

    def unfitted(self, weights: Iterable[str]) -> str:
        """A sentence that names the formats whose own costs no measurement gave; empty where all were fitted."""
        names = ", ".join(one for one in weights if one not in self.fit.costs.kernel_s)
        return f"{names}: not measured here, predicted with the costs of unquantized weights." if names else ""

    def run(self, engine: Engine, loads: Iterable[Load]) -> Run:
        """Simulate a load. Raises SimulationError."""
        costs = self.fit.costs_of(engine.weights)
        return simulate(loads, engine, StepTime(self.shape, self.gpu, costs, engine), costs)

    def engine(self, weights: str, budget: int = 8192, sequences: int = 256) -> Engine | None:
        """An engine with the KV cache that fits beside the weights; None where none does."""
        left = MEMORY_SHARE * self.gpu.memory - self.shape.memory_bytes(weights) - ACTIVATIONS
        tokens = int(left / self.shape.kv_bytes("16-bit"))
        return Engine(sequences, budget, weights, kv_cache_tokens=tokens) if tokens > 0 else None


def published_bands(fit: Fit) -> dict[str, tuple[float, float]]:
    """Least and most of measured over predicted, by latency, over the published rates whose kernels vLLM would take
    today: those of the older AWQ kernel are left out.
    """
    table = published.check(fit)
    table = table[~table["old_kernel"]]
    ratio = table["measured_s"] / table["predicted_s"]
    return {str(name): (float(own.min()), float(own.max())) for name, own in ratio.groupby(table["metric"])}


def held_out_bands(studies: Sequence[records.Records], fit: Fit) -> dict[str, tuple[float, float]]:
    """The middle 90 % of measured over predicted, by latency, over points of a machine that were not fitted."""
    table = predictions.points(predictions.cells(studies, {fit.device: fit}))
    table = table[~table["fitted"]]
    ratio = table["measured_s"] / table["predicted_s"]
    return {
        str(name): (float(own.quantile(0.05)), float(own.quantile(0.95)))
        for name, own in ratio.groupby(table["metric"])
    }


def loads(question: Question, output_tokens: int | None = None) -> list[Load]:
    """The question's load, perhaps with another output length."""
    tokens = output_tokens or question.output_tokens
    if question.rate_per_s is not None:
        requests = max(100, round(question.rate_per_s * POISSON_S))
        return poisson(question.rate_per_s, question.prompt_tokens, tokens, requests)
    return closed(question.concurrency or 1, question.prompt_tokens, tokens, REQUESTS_EACH)


def serve(question: Question, row: Any, gpu: Gpu, shape: Shape) -> str:
    """A candidate as a vllm serve line."""
    weights = str(row["weights"])
    model = question.model if weights != "int4" else f"{question.model}-AWQ"
    length = max(2048, 1 << math.ceil(math.log2(question.prompt_tokens + question.output_tokens)))
    line = f"vllm serve {model} --max-model-len {length}"
    line += f" --max-num-batched-tokens {row['max_num_batched_tokens']} --max-num-seqs {row['max_num_seqs']}"
    if shapes.FORMATS[weights].quantization:
        line += f" --quantization {shapes.FORMATS[weights].quantization}"
    if not gpu.bfloat16:
        line += " --dtype half"
    return line + ("  # the name of an AWQ or GPTQ checkpoint that you trust" if weights == "int4" else "")


def _check(question: Question) -> None:
    if (question.concurrency is None) == (question.rate_per_s is None):
        raise QuestionError("load: give one of --concurrency and --rate")
    for name in ("concurrency", "rate_per_s", "output_tokens", "prompt_tokens"):
        value = getattr(question, name)
        if value is not None and value <= 0:
            raise QuestionError(f"{name} {value:g}: allowed: above 0")
    if not question.slo:
        raise QuestionError("slo: no limit given; allowed: e.g. --slo 'e2e_p95<1s'")


def _predicted(question: Question, oracle: Oracle) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for weights in WEIGHTS:
        if oracle.gpu is oracle.fit.gpu and weights not in oracle.fit.costs.kernel_s:
            continue  # this GPU was measured, and this format on it was not
        for budget in BUDGETS:
            for sequences in SEQUENCES:
                engine = oracle.engine(weights, budget, sequences)
                if engine is None:
                    continue
                try:
                    run = oracle.run(engine, loads(question))
                except SimulationError:
                    continue
                row = _judged(question, run.requests, run.output_tokens_per_s, oracle.bands)
                row |= {"what": "predicted", "setting": f"{weights} budget={budget} seqs={sequences}"}
                row |= {"weights": weights, "max_num_batched_tokens": budget, "max_num_seqs": sequences}
                row["key"] = (weights, budget, sequences)
                # Limits that this load never reaches change nothing: the loosest of equals stands for all.
                found[weights, round(run.requests["e2e_s"].sum(), 6), round(run.requests["ttft_s"].sum(), 6)] = row
    return list(found.values())


def _measured(question: Question, gpu: Gpu, shape: Shape, studies: Iterable[records.Records]) -> list[dict[str, Any]]:
    """Settings measured on this GPU with this model, under this load with these lengths."""
    found = []
    for study in studies:
        cells = study.cells[study.cells["status"].eq("done") & study.cells["load"].eq(_kind(question))]
        for setting, own in cells.groupby("setting", sort=False):
            cell = own.iloc[0].to_dict()
            if not _is(cell, gpu, shape):
                continue
            requests = study.part(own).requests
            rows = metrics.latencies(requests)
            rows = rows[_as_asked(rows, question)]
            if rows.empty:
                continue
            rates = metrics.throughput(requests)
            total = rates.loc[rates["cell"].isin(rows["cell"]), ["output_tokens", "span_s"]].sum()
            row = _judged(question, rows, total["output_tokens"] / total["span_s"], {}, span_s=total["span_s"])
            weights = observations.weights_of(cell)
            row |= {"what": "measured", "setting": f"{setting} ({study.path.name})", "weights": weights}
            row |= {name: int(cell[name]) for name in ("max_num_batched_tokens", "max_num_seqs")}
            row["key"] = (weights, row["max_num_batched_tokens"], row["max_num_seqs"])
            found.append(row)
    return found


def _as_asked(rows: pd.DataFrame, question: Question) -> np.ndarray:
    """Which requests had the question's load and output length, and a prompt of about the question's length."""
    column, level = "concurrency", question.concurrency and float(question.concurrency)
    if level is None:
        column, level = "rate_per_s", question.rate_per_s
    same = rows[column].eq(float(level or 0)) & rows["output_tokens"].eq(question.output_tokens)
    same &= rows["prompt_tokens"].between(question.prompt_tokens / 2, question.prompt_tokens * 2)
    return same.fillna(False).to_numpy(bool)


def _kind(question: Question) -> str:
    return "closed" if question.concurrency else "poisson"


def _is(cell: observations.Cell, gpu: Gpu, shape: Shape) -> bool:
    if bool(cell["enforce_eager"]) and gpu.name != gpus.CPU.name:
        return False  # nobody is recommended to run it
    try:
        return gpus.find(str(cell["device"])).name == gpu.name and str(cell["model"]).lower() == shape.name.lower()
    except gpus.GpuError:
        return False


def _judged(
    question: Question,
    requests: pd.DataFrame,
    tokens_per_s: float,
    bands: Mapping[str, tuple[float, float]],
    span_s: float | None = None,
) -> dict[str, Any]:
    """The SLO's statistics of some requests with their bands, and whether they meet it."""
    row: dict[str, Any] = {}
    worst = least = most = 0.0
    for name, limit_s in question.slo.items():
        latency, statistic = name.split("_")
        value = goodput.statistic(requests[f"{latency}_s"].dropna(), statistic)
        low, high = (value * factor for factor in bands.get(latency, (1.0, 1.0)))
        row |= {f"{name}_s": value, f"{name}_low": low, f"{name}_high": high}
        worst, least, most = (max(old, new / limit_s) for old, new in ((worst, value), (least, low), (most, high)))
    if span_s is None:
        span_s = float(requests["last_token_s"].max() - requests["scheduled_s"].min())
    within = goodput.good(requests, question.slo)
    meets = "yes" if most < 1 else "likely" if worst < 1 else "unlikely" if least < 1 else "no"
    return row | {
        "attained": float(within.mean()),
        "goodput_per_s": float(within.sum() / span_s),
        "output_tokens_per_s": float(tokens_per_s),
        "worst": worst,
        "meets": meets,
    }


def longest_output(question: Question, oracle: Oracle, engine: Engine, factor: str = "high") -> int:
    """The largest output length that meets the SLO under the question's load; 0 where not even one token does.

    factor : "high" counts with the band's upper end, "value" with the prediction itself
    """

    def meets(tokens: int) -> bool:
        try:
            run = oracle.run(engine, loads(question, tokens))
        except SimulationError:
            return False
        row = _judged(question, run.requests, 0.0, oracle.bands)
        return bool(row["meets"] == "yes" if factor == "high" else row["worst"] < 1)

    low, high = 0, LONGEST
    if meets(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _what_would(question: Question, best: Any, oracle: Oracle) -> list[str]:
    """What comes closest, and what else would meet the SLO: fewer tokens, less load, another GPU."""
    name = max(question.slo, key=lambda one: best[f"{one}_s"] / question.slo[one])
    closest = f"{name.replace('_', ' ')} {seconds(best[f'{name}_s'])} against {seconds(question.slo[name])}"
    notes = [f"Nothing is likely to meet the SLO. Closest: {best['setting']} ({best['what']}), {closest}."]
    would = []
    engines = {weights: oracle.engine(weights) for weights in WEIGHTS}
    outputs = {w: longest_output(question, oracle, engine, "value") for w, engine in engines.items() if engine}
    weights = max(outputs, key=lambda w: outputs[w])
    if any(outputs.values()):
        shorter = ", ".join(f"{tokens} with {w}" for w, tokens in outputs.items() if tokens)
        would.append(f"outputs of at most so many tokens: {shorter}")
    engine = engines[weights]
    if question.concurrency and question.concurrency > 1 and engine is not None:
        fits = [c for c in range(1, question.concurrency) if _meets(replace(question, concurrency=c), oracle, engine)]
        if fits:
            would.append(f"a concurrency of at most {max(fits)} with {weights}")
    others = []
    for gpu in gpus.GPUS:
        if gpu.bandwidth <= oracle.gpu.bandwidth:
            continue
        other = replace(oracle, gpu=gpu)
        working = [w for w in WEIGHTS if (found := other.engine(w)) and _meets(question, other, found)]
        if working:
            others.append(f"{gpu.name} ({working[0]})")
    if others:
        would.append(f"another GPU: {', '.join(others)}")
    text = "; ".join(would) if would else "nothing among shorter outputs, less load and the GPUs of the table"
    return [*notes, f"What would, by prediction: {text}."]


def _meets(question: Question, oracle: Oracle, engine: Engine) -> bool:
    try:
        run = oracle.run(engine, loads(question))
    except SimulationError:
        return False
    return bool(_judged(question, run.requests, 0.0, {})["worst"] < 1)


def shortlist(answer: Answer, most: int = 8) -> pd.DataFrame:
    """The candidates of the Pareto set, and of the others as many of the best as there is room for; best first."""
    table = answer.candidates
    others = table[~table["pareto"]].head(max(0, most - int(table["pareto"].sum())))
    return pd.concat([table[table["pareto"]], others]).sort_index()


def text(answer: Answer) -> str:
    """An answer for a terminal: the shortlist, the line to paste, and the notes."""
    names = list(answer.question.slo)
    head = ["", "setting", *(name.replace("_", " ") for name in names), "goodput/s", "tokens/s", "meets the SLO"]
    lines = [head]
    for row in shortlist(answer).to_dict("records"):
        values = [with_band(row, name) for name in names]
        mark = "*" if row["pareto"] else " "
        rates = [f"{row['goodput_per_s']:.3g}", f"{row['output_tokens_per_s']:,.0f}"]
        lines.append([mark + str(row["what"]), str(row["setting"]), *values, *rates, str(row["meets"])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    pareto = f"Pareto set of {len(answer.candidates)} settings"
    out.append(f"* {pareto}: no other has more goodput and stays further from the limits")
    return "\n".join([*out, "", *answer.notes, *(["", answer.command] if answer.command else [])])


def with_band(row: Mapping[Any, Any], name: str) -> str:
    """A candidate's statistic with its band; a measured one has none."""
    value, low, high = (row[f"{name}{end}"] for end in ("_s", "_low", "_high"))
    return seconds(value) if low == high else f"{seconds(value)} [{seconds(low)}, {seconds(high)}]"
