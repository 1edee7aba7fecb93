"""The command line: python -m latency_lab COMMAND; `--help` on any command tells more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from latency_lab import ROOT

if TYPE_CHECKING:
    from latency_lab.study import ModelSource, Study


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of the user are one line each on stderr, with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m latency_lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    study = commands.add_parser("study", help="measure the study that fits this machine")
    study.add_argument("--force", action="store_true", help="measure again what has been measured")

    sweep = commands.add_parser("sweep", help="measure a study's settings, resuming where it was left")
    sweep.add_argument("study", type=Path, help="a YAML file, e.g. notebooks/studies/cpu-smoke.yaml")
    sweep.add_argument(
        "--runs", type=Path, default=ROOT / "data" / "runs", help="where results go (default: data/runs)"
    )
    sweep.add_argument("--force", action="store_true", help="measure again what has been measured")

    sweep.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="one engine after another here, or many on a Ray cluster (docs/clusters.md)",
    )
    sweep.add_argument("--ray-address", metavar="HOST:PORT", help="of a running cluster (default: one on this machine)")
    sweep.add_argument("--cores", type=_positive, help="with ray: logical cores for each engine, which it is pinned to")

    check = commands.add_parser("check", help="read a study, say what it would measure and how long, start nothing")
    check.add_argument("study", type=Path)

    report = commands.add_parser("report", help="figures and HTML from data/, without vLLM")
    report.add_argument("--data", type=Path, default=ROOT / "data")
    report.add_argument("--figures", type=Path, default=ROOT / "figures")

    pack = commands.add_parser("pack", help="pack a measured study into two files, e.g. for data/reference/")
    pack.add_argument("source", type=Path, help="e.g. data/runs/cpu-smoke")
    pack.add_argument("target", type=Path, help="e.g. data/reference/cpu-smoke")

    bench_file = commands.add_parser(
        "import-bench", help="bring results of `vllm bench serve --save-detailed` into the records"
    )
    bench_file.add_argument("files", type=Path, nargs="+", metavar="FILE", help="its JSON")
    bench_file.add_argument("--study", default="imported", help="name of the study to add to (default: imported)")
    bench_file.add_argument("--setting", help="label of the engine's setting, e.g. 'budget=2048 seqs=32'")
    bench_file.add_argument("--workload", help="name of the workload (default: its lengths)")
    bench_file.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the file can't know: device=..., dtype=...",
    )
    bench_file.add_argument("--runs", type=Path, default=ROOT / "data" / "runs")

    verify = commands.add_parser("verify", help="recompute every number of README.md's findings from data/reference/")
    verify.add_argument("--write", action="store_true", help="write the recomputed findings into README.md")

    bench = commands.add_parser("bench", help="measure what this study's own tools cost, beside vLLM's own benchmark")
    bench.add_argument("parts", nargs="*", metavar="PART", help="some of its parts (default: all)")

    advice = commands.add_parser("recommend", help="which setting to run for a load and its SLOs, and how to start it")
    advice.add_argument("--model", required=True, help="a hub id or folder, e.g. Qwen/Qwen3-4B-Instruct-2507")
    advice.add_argument("--gpu", required=True, help="e.g. L4; what it lists if it does not know yours")
    advice.add_argument("--concurrency", type=int, help="requests in flight at a time")
    advice.add_argument("--rate", type=float, help="in its place: requests a second, at random (Poisson)")
    advice.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    advice.add_argument("--output-tokens", type=int, required=True)
    advice.add_argument("--slo", required=True, help='limits, e.g. "e2e_p95<1s,ttft_p95<300ms"')
    advice.add_argument("--data", type=Path, default=ROOT / "data", help="studies to learn from (default: data)")

    options = parser.parse_args(arguments)
    try:
        return int(_COMMANDS[options.command](options))
    except _user_errors() as error:
        print(error, file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: 1 or more")
    return number


def _study(options: argparse.Namespace) -> int:
    from latency_lab import machine

    gpu = machine.has_gpu()
    options.study = ROOT / "notebooks" / "studies" / ("gpu.yaml" if gpu else "cpu-smoke.yaml")
    options.runs = ROOT / "data" / "runs"
    options.executor, options.ray_address, options.cores = "local", None, None
    print(f"{'an NVIDIA GPU' if gpu else 'no NVIDIA GPU'} here: {machine.device()}; study: {options.study.name}")
    return _sweep(options)


def _sweep(options: argparse.Namespace) -> int:
    from latency_lab import sweep, vllm_args
    from latency_lab.study import load_study

    arguments = vllm_args.installed()
    if arguments is None:
        raise sweep.SweepError("vLLM is not installed in this environment: run `make setup`")
    if options.executor == "local" and (options.ray_address or options.cores):
        raise sweep.SweepError("--ray-address and --cores go with --executor ray")
    study = load_study(options.study.resolve(), arguments)
    runs = options.runs.resolve()
    return sweep.run(study, runs, options.force, options.executor, options.ray_address, options.cores)


def _check(options: argparse.Namespace) -> int:
    from latency_lab import vllm_args
    from latency_lab.study import load_study

    study = load_study(options.study.resolve(), vllm_args.installed())
    for setting in study.settings_in_order():
        points = {plan.point.label: plan for plan in study.cells(setting)}
        print(f"{setting.label}: {len(study.cells(setting))} cells ({', '.join(points)})")
    for line in (*study.traffic(), *_cut_texts(study)):
        print(line)
    print(f"about {study.estimate_s() / 60:.0f} min at the speeds that the study assumes, if nothing fails")
    return 0


def _cut_texts(study: Study) -> Iterator[str]:
    """How many requests of each point a text of a file makes too long: only the model's tokenizer can tell."""
    from latency_lab import load, models
    from latency_lab.study import derive_seed

    vocabularies: dict[ModelSource, models.Tokens] = {}
    for point in study.points():
        if not any(traffic.prompts for traffic in point.classes):
            continue
        model = next(setting.model for setting in study.settings() if point.runs_on(setting))
        if model not in vocabularies:
            vocabularies[model] = models.Tokens(models.prepare(model, ROOT / "data" / "models"))
        try:
            streams = load.streams(point, 0, derive_seed(study.seed, point.id, 0), vocabularies[model])
            requests = [request for stream in streams for request in islice(stream.requests, 1000)]
        except ValueError as error:  # no chat template, or a text that cannot be cut
            raise models.ModelError(f"{study.path}: {point.label}: {str(error).splitlines()[0]}") from error
        cut = sum(request.clamped for request in requests)
        yield f"{point.label}: {cut:,} of the first {len(requests):,} requests cut to max_model_len"


def _report(options: argparse.Namespace) -> int:
    from latency_lab import report

    result = report.build(options.data.resolve(), options.figures.resolve(), options.figures.resolve() / "report")
    return 0 if result else 1


def _pack(options: argparse.Namespace) -> int:
    from latency_lab import records

    records.pack(options.source, options.target)
    size = sum(path.stat().st_size for path in options.target.glob("*.parquet"))
    print(f"{options.target}: {size / 1e6:.2f} MB")
    return 0


def _import_bench(options: argparse.Namespace) -> int:
    from latency_lab import import_bench

    study = import_bench.study_folder(options.runs.resolve(), options.study)
    for path in options.files:
        for cell in import_bench.import_file(path, study, options.setting, options.workload, options.fact):
            print(f"{path}: {cell}")
    print(f"in {study}; `make report` draws it")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from latency_lab import prose

    return prose.verify(ROOT / "README.md", ROOT / "data", options.write)


def _bench(options: argparse.Namespace) -> int:
    from latency_lab import bench

    return bench.run(options.parts)


def _recommend(options: argparse.Namespace) -> int:
    from latency_lab import goodput, predictions, recommend, records

    folders = [*records.studies(options.data / "reference"), *records.studies(options.data / "runs")]
    studies = [records.load(folder) for folder in folders]
    for line in (line for study in studies for line in study.harmed):
        print(f"left out: {line}", file=sys.stderr)
    question = recommend.Question(
        options.model,
        options.gpu,
        goodput.parse(options.slo),
        options.output_tokens,
        options.prompt_tokens,
        options.concurrency,
        options.rate,
    )
    print(recommend.text(recommend.recommend(question, studies, predictions.fits(studies))))
    return 0


_COMMANDS = {
    "study": _study,
    "sweep": _sweep,
    "check": _check,
    "report": _report,
    "pack": _pack,
    "import-bench": _import_bench,
    "verify": _verify,
    "bench": _bench,
    "recommend": _recommend,
}


def _user_errors() -> tuple[type[Exception], ...]:
    from latency_lab.models import ModelError
    from latency_lab.records import BadRecord
    from latency_lab.study_file import StudyError

    errors: tuple[type[Exception], ...] = (StudyError, ModelError, BadRecord, FileNotFoundError)
    if "latency_lab.sweep" in sys.modules:
        errors += (sys.modules["latency_lab.sweep"].SweepError, sys.modules["latency_lab.ray_executor"].ClusterError)
    if "latency_lab.vllm_bench" in sys.modules:
        errors += (sys.modules["latency_lab.vllm_bench"].BenchError,)
    if "latency_lab.headline" in sys.modules:
        errors += (sys.modules["latency_lab.headline"].NoLongerTrue,)
    if "latency_lab.recommend" in sys.modules:
        from latency_lab import goodput, gpus, recommend

        errors += (goodput.SloError, gpus.GpuError, recommend.QuestionError)
    return errors


if __name__ == "__main__":
    sys.exit(main())
