"""The report on a small made-up study: self-contained pages, links that lead somewhere, errors that are
shown.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import synthetic

from latency_lab import records, report, tables

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A study measured here with a harmed cell, a reference of the same name that cannot be read, and a page of a
    study long gone.
    """
    root = tmp_path_factory.mktemp("report")
    study = root / "data" / "runs" / "made-up"
    synthetic.write_study(study, budgets=(128, 512), concurrency=(1, 4, 20), repeats=2)
    harmed = study / "harmed" / "c9.cell.parquet"
    harmed.parent.mkdir()
    harmed.write_text("truncated")
    broken = root / "data" / "reference" / "made-up"
    broken.mkdir(parents=True)
    (broken / "cells.parquet").write_text("truncated")
    out = root / "figures" / "report"
    out.mkdir(parents=True)
    (out / "long-gone.html").write_text("stale")
    result = report.build(root / "data", root / "figures", out)
    return root, result


@pytest.fixture(scope="module")
def page(built):
    return (built[0] / "figures" / "report" / "made-up.html").read_text()


def test_one_broken_study_does_not_hide_the_other(built):
    root, result = built
    assert result is None  # so that the command exits with 1
    index = (root / "figures" / "report" / "index.html").read_text()
    assert "not a readable parquet file" in index
    assert 'href="made-up.html"' in index
    assert sorted(path.name for path in (root / "figures" / "report").iterdir()) == [
        "claims.html",
        "index.html",
        "made-up.html",
        "roofline.html",
    ]
    assert 'href="claims.html"' in index and 'href="roofline.html"' in index


def test_a_harmed_cell_is_left_out_and_named(built, page):
    index = (built[0] / "figures" / "report" / "index.html").read_text()
    for text in (index, page):
        assert "harmed: " in text and "harmed/c9.cell.parquet: not a readable parquet file" in text


def test_every_link_of_the_pages_leads_somewhere(built):
    folder = built[0] / "figures" / "report"
    for path in folder.glob("*.html"):
        for link in re.findall(r'href="([^"]*)"', path.read_text()):
            file, _, place = html.unescape(link).partition("#")
            if not link.startswith("data:"):
                target = folder / file if file else path
                assert target.is_file(), link
                assert not place or f'id="{place}"' in target.read_text(), link


def test_pages_fetch_nothing(built):
    for path in (built[0] / "figures" / "report").glob("*.html"):
        text = path.read_text()
        assert not re.search(r'(src|href|action|srcset)\s*=\s*["\']?(https?:)?//', text)
        assert not re.search(r"<script[^>]*\ssrc|@import|url\(|<iframe|fetch\(|import\(", text)


def test_figures_are_written_and_described(built, page):
    folder = built[0] / "figures" / "build" / "made-up"
    for name in ("tradeoff", "goodput", "distributions", "heat-maps", "stalls", "ttft-split", "budget-tradeoff"):
        assert {path.suffix for path in folder.glob(f"{name}.*")} == {".png", ".svg", ".csv"}
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == 7  # and the figures of scheduler steps, quantization and doors say why there are none
    assert page.count('class="absent"') == 6
    assert all(re.search(r'alt="[^"]{20,}"', image) and 'src="data:image/png;base64,' in image for image in images)


def test_page_says_what_was_measured_and_folds_code(page):
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for fact in ("made-up CPU", "2026-01-02", "random weights", "1 of 20 requests failed", "measured here"):
        assert fact in text
    assert "must be at least max_num_seqs" in text
    assert page.count('<details class="code">') == page.count("<pre><code>")
    assert "Traceback" not in page


def test_nothing_to_report_is_said(tmp_path, capsys):
    assert report.build(tmp_path / "data", tmp_path / "figures", tmp_path / "out") is None
    assert "make study" in capsys.readouterr().out
    assert "make study" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize("path", [report.NOTEBOOK, report.CLAIMS, report.ROOFLINE], ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs_and_has_short_cells(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert "parameters" in code[0].metadata.tags
    assert max(len(cell.source.splitlines()) for cell in code) <= 7
    assert not any(re.search(r"^\s*(def|class) ", cell.source, re.M) for cell in code)


def probe(folder, source):
    """A notebook with analysis.ipynb's parameters and one cell."""
    cells = [nbformat.v4.new_code_cell("records = figures = ''", metadata={"tags": ["parameters"]})]
    cells.append(nbformat.v4.new_code_cell(source))
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "probe.ipynb")
    return folder / "probe.ipynb"


def test_kernel_is_this_interpreter(tmp_path, monkeypatch):
    """Even where the user has installed a kernel `python3` of another interpreter."""
    foreign = tmp_path / "kernels" / "python3"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text(
        json.dumps({"argv": ["/no/such/python"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setattr(report, "NOTEBOOK", probe(tmp_path, "import sys; print(sys.executable, records)"))
    executed = json.loads(report.execute(tmp_path, tmp_path))
    assert f"{sys.executable} {tmp_path}" in json.dumps(executed["cells"][-1]["outputs"])


def test_error_of_a_cell_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "NOTEBOOK", probe(tmp_path, "raise ValueError('no such\\ncolumn')"))
    with pytest.raises(Exception) as caught:
        report.execute(tmp_path, tmp_path)
    assert report._one_line(caught.value) == "ValueError: no such column"


def test_tables_escape_and_sort_by_value():
    text = tables.table(["<b>"], [[("<script>", None)], [("1,000", 1000.0)]])
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert 'data-key="1000"' in text


def test_facts_come_from_the_records(tmp_path):
    study = records.load(synthetic.write_study(tmp_path / "made-up", budgets=(128,), repeats=1))
    facts = tables.facts(study)
    assert facts["Machine"] == "made-up CPU, 2 cores, 24 GiB memory"
    assert facts["Requests"] == "84, of which 1 failed"
    assert facts["Cells"] == "9, of which 8 done, 1 refused"


PROBE = """<!DOCTYPE html><html><head><title>waiting</title><meta charset="utf-8"></head><body><script>
const page = {page};
const frames = [1280, 390].map((width) => {{
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${{width}}px;height:900px;border:0`;
  frame.srcdoc = page;
  document.body.append(frame);
  return frame;
}});
window.onload = () => {{
  const found = frames.map((frame) => {{
    const inside = frame.contentDocument;
    const images = [...inside.images];
    const table = [...inside.querySelectorAll("table.sortable")].at(-1);
    const column = () => [...table.tBodies[0].rows].map((row) => row.cells[2].dataset.key);
    table?.tHead.rows[0].cells[2].querySelector("button").click();
    return {{
      width: frame.contentWindow.innerWidth,
      scroll: inside.documentElement.scrollWidth,
      images: images.length,
      broken: images.filter((image) => !image.complete || image.naturalWidth === 0).length,
      sorted: table ? column() : [],
    }};
  }});
  document.title = JSON.stringify(found);
}};
</script></body></html>"""


def chromium(url: str, profile: Path) -> tuple[str, str]:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", "--dump-dom", url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout, run.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("name", ["made-up.html", "index.html", "claims.html", "roofline.html"])
def test_in_chromium(built, tmp_path, name):
    """No console message, every image loads, no sideways scrolling on a desk or a phone, tables sort."""
    path = built[0] / "figures" / "report" / name
    _, log = chromium(path.as_uri(), tmp_path / "profile")
    assert "CONSOLE" not in log
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(page=json.dumps(path.read_text()).replace("</", "<\\/")))
    dom, log = chromium(probe.as_uri(), tmp_path / "profile")
    assert "CONSOLE" not in log
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    found = json.loads(html.unescape(title.group(1)))
    assert [frame["width"] for frame in found] == [1280, 390]
    for frame in found:
        assert frame["scroll"] <= frame["width"]
        assert frame["images"] == (7 if name == "made-up.html" else 0) and frame["broken"] == 0
        numbers = [float(key) for key in frame["sorted"] if key is not None]
        assert numbers == sorted(numbers)
        assert (len(numbers) > 10) == (name == "made-up.html")


def test_the_claims_page_has_a_verdict_for_each_claim(built):
    text = (built[0] / "figures" / "report" / "claims.html").read_text()
    assert "15 claims, 15 verdicts: 15 not tested" in text
    assert text.count("<h3") == 15 and "Traceback" not in text
