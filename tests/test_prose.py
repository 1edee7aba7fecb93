"""README's numbers are those that the committed data gives."""

import pytest

from latency_lab import ROOT, prose


@pytest.fixture(scope="module")
def findings():
    return prose.findings(ROOT / "data" / "reference")


@pytest.fixture(autouse=True)
def computed_once(findings, monkeypatch):
    monkeypatch.setattr(prose, "findings", lambda reference: findings)


def test_the_readme_says_what_the_data_gives(capsys):
    assert prose.verify(ROOT / "README.md", ROOT / "data") == 0


def test_a_changed_number_is_found(tmp_path, capsys):
    text = (ROOT / "README.md").read_text()
    head, rest = text.split(prose.BEGIN)
    block = rest.split(prose.END)[0]
    digit = next(index for index, character in enumerate(block) if character.isdigit())
    wrong = block[:digit] + ("8" if block[digit] != "8" else "7") + block[digit + 1 :]
    copy = tmp_path / "README.md"
    copy.write_text(text.replace(block, wrong))
    assert prose.verify(copy, ROOT / "data") == 1
    assert "not what the data gives" in capsys.readouterr().out
    assert prose.verify(copy, ROOT / "data", write=True) == 0
    assert copy.read_text() == text


def test_a_readme_without_findings_is_named(tmp_path):
    (tmp_path / "README.md").write_text("# nothing here")
    with pytest.raises(ValueError, match=r"README\.md: no findings"):
        prose.verify(tmp_path / "README.md", ROOT / "data")


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")])
def test_numbers_have_three_significant_digits(value, text):
    assert prose._three(value) == text
