"""From records to pages: analysis.ipynb runs once a study, claims.ipynb and roofline.ipynb once for all, each becoming
one self-contained HTML file; an index links them.

Nothing here needs vLLM, and no page fetches anything when it is read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latency_lab import ROOT, environment, files, records, tables

NOTEBOOK = ROOT / "notebooks" / "analysis.ipynb"
CLAIMS = ROOT / "notebooks" / "claims.ipynb"
ROOFLINE = ROOT / "notebooks" / "roofline.ipynb"
TITLES = {CLAIMS: "The thread's claims: vLLM latency", ROOFLINE: "From the measured GPU to yours: vLLM latency"}
"""Titles of the pages that speak of all studies together."""
TEMPLATES = Path(__file__).parent / "templates"

MEASURED = "measured here"
REFERENCE = "reference"


@dataclass
class Page:
    """One study's page: the folder of its records, whether they were measured here, and how rendering it
    went.
    """

    records: Path
    source: str
    file: str
    figures: Path
    facts: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    error: str = ""

    @property
    def study(self) -> str:
        """The study's name: its folder's."""
        return self.records.name


def build(data_root: Path, figures_root: Path, out: Path) -> Path | None:
    """Draw all figures and pages of the studies in data_root/runs and data_root/reference.

    A study that was measured here and has a reference gets two pages. Figures of a reference go to
    figures_root/<study>, of runs to figures_root/build/<study>, pages and index.html to `out`, where pages of
    studies that no longer exist are removed. A study that cannot be rendered does not keep others from it:
    the index shows its error. Returns the index, or None where there was nothing to render or a study could
    not be.
    """
    began = time.monotonic()
    pages = _pages(data_root, figures_root)
    common = {
        notebook: Page(data_root, "all studies", f"{notebook.stem}.html", figures_root / notebook.stem)
        for notebook in TITLES
    }
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        try:
            study = records.load(page.records)
            page.facts, page.requests = tables.facts(study), int(study.cells["requests"].sum())
            for line in study.harmed:
                print(f"{page.study} ({page.source}): left out, a sweep measures it again: {line}", flush=True)
        except Exception as error:  # whatever it is, other studies are still worth reading
            page.error = _one_line(error)
            print(f"{page.study} ({page.source}): failed: {page.error}", flush=True)
    readable = [page.records for page in pages if not page.error]
    # Two at a time: each is a kernel of its own, and a page takes mostly one core.
    with ProcessPoolExecutor(2) as pool:
        drawn = {}
        for notebook, page in common.items() if readable else ():  # first, as they take longest
            drawn[pool.submit(_render_common, notebook, readable, page.figures)] = (page, notebook.stem)
        for page in sorted(pages, key=lambda page: page.requests, reverse=True):
            if not page.error:
                drawn[pool.submit(_render, page)] = (page, page.study)
        for future in as_completed(drawn):
            page, name = drawn[future]
            try:
                files.write_text(future.result(), out / page.file)
            except Exception as error:
                page.error = _one_line(error)
            outcome = f"failed: {page.error}" if page.error else f"{out / page.file}"
            print(f"{name} ({page.source}): {outcome}", flush=True)
    written = [*pages, *(common.values() if readable else [])]
    for stale in set(out.glob("*.html")) - {out / page.file for page in written if not page.error}:
        stale.unlink()
    index = out / "index.html"
    files.write_text(_index(pages, common if readable else {}), index)
    if not pages:
        print(f"no records in {data_root / 'runs'} or {data_root / 'reference'}: `make study` measures this machine")
        return None
    print(f"report: {index} ({time.monotonic() - began:.0f} s)")
    return None if any(page.error for page in written) else index


def execute(page_records: Path, figures: Path) -> str:
    """Run analysis.ipynb on one study and return the executed notebook's JSON. Raises what papermill raises."""
    return _run(NOTEBOOK, {"records": _relative(page_records), "figures": _relative(figures)})


def _run(notebook: Path, parameters: dict[str, Any]) -> str:
    """Run a notebook and return it as JSON: in this very interpreter, whatever kernels the user has installed."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="latency-lab-report-") as folder, _own_kernel(Path(folder)):
        target = Path(folder) / notebook.name
        papermill.execute_notebook(
            str(notebook),
            str(target),
            parameters=parameters,
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            cwd=str(ROOT),
        )
        return target.read_text()


def to_html(notebook: str, title: str, source: str) -> str:
    """An executed notebook as a page of its own."""
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="study", extra_template_basedirs=[str(TEMPLATES)])
    page = {"title": title, "source": source}
    body, _ = exporter.from_notebook_node(nbformat.reads(notebook, as_version=4), {"page": page})
    return str(body)


def _pages(data_root: Path, figures_root: Path) -> list[Page]:
    measured = [
        Page(path, MEASURED, f"{path.name}.html", figures_root / "build" / path.name)
        for path in records.studies(data_root / "runs")
    ]
    names = {page.study for page in measured}
    return measured + [
        Page(path, REFERENCE, f"{path.name}{'-reference' * (path.name in names)}.html", figures_root / path.name)
        for path in records.studies(data_root / "reference")
    ]


def _render(page: Page) -> str:
    return to_html(execute(page.records, page.figures), f"{page.study}: vLLM latency", f"{page.study}, {page.source}")


def _render_common(notebook: Path, folders: list[Path], figures: Path) -> str:
    parameters = {"records": [_relative(folder) for folder in folders], "figures": _relative(figures)}
    return to_html(_run(notebook, parameters), TITLES[notebook], "all studies")


def _index(pages: list[Page], common: dict[Path, Page]) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    css = jinja2.filters.Markup((TEMPLATES / "study" / "page.css").read_text())
    return environment.get_template("studies.html.j2").render(
        pages=pages, verdicts=common.get(CLAIMS), predictions=common.get(ROOFLINE), css=css
    )


@contextmanager
def _own_kernel(folder: Path) -> Iterator[None]:
    """A kernel `python3` that is this interpreter, found before any other; no history or start-up files of
    the user.
    """
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    wanted = {
        "JUPYTER_PATH": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with environment.holding(wanted):
        yield


def _relative(path: Path) -> str:
    """As a notebook's parameter: from the project's folder where it is inside, so that pages are the same
    everywhere.
    """
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _one_line(error: Exception) -> str:
    """An exception as one line; of a notebook's failure the error in the cell, not papermill's frame around
    it.
    """
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return re.sub(r"\s+", " ", f"{name}: {value}").strip()[:500]
