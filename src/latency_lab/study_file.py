"""A study's YAML text: plain values, the line that each of them stands on, and errors that name both.

Scalars follow YAML 1.2: `1e3` is a number, `off` and `no` are words (whoever knows the type turns them into
False), dates and `1:30` are text. Duplicate keys, which YAML readers usually take the last of, are errors.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Loc = tuple[Any, ...]
"""Where a value stands: the keys and list positions that lead to it, e.g. ("workloads", "chat", "prompt")."""


class StudyError(Exception):
    """A study that cannot be run. Each of `problems` names file, line, key, value and what is allowed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass
class Lines:
    """The line of a key or list item (1-based), and below it those of what it holds."""

    line: int
    children: dict[Any, Lines] = field(default_factory=dict)


@dataclass
class StudyFile:
    """A study's values, what is wrong with them as YAML, and the means to say where a problem with one of them is."""

    path: Path
    values: dict[str, Any]
    lines: Lines
    problems: list[Problem]

    def problem(self, loc: Loc, text: str) -> Problem:
        """A problem with the value at `loc`; parts of it that the file does not have are passed over."""
        at, known = self.lines, []
        for part in loc:
            if part in at.children:
                at = at.children[part]
                known.append(f"[{part}]" if isinstance(part, int) else f".{part}")
        return Problem(at.line, "".join(known).lstrip(".") or "study", text)

    def error(self, problems: Iterable[Problem]) -> StudyError:
        """The problems and the file's own as one error, in the order of their lines, each once."""
        known = {(problem.line, problem.key) for problem in self.problems}
        found = {problem for problem in problems if (problem.line, problem.key) not in known}
        ordered = sorted(found.union(self.problems), key=lambda problem: (problem.line, problem.key))
        return StudyError(f"{self.path}:{p.line}: {p.key}: {p.text}" for p in ordered)


@dataclass(frozen=True)
class Problem:
    """What is wrong with one value: its line, its key (dotted), and a sentence."""

    line: int
    key: str
    text: str


def read(path: Path) -> StudyFile:
    """Read a study's YAML. Raises StudyError where there is none, or where it is not one mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StudyError([f"{path}: there is no such file; allowed: the path of a study's YAML file"]) from None
    except UnicodeDecodeError as error:
        raise StudyError([f"{path}:1: byte {error.start}: not text; allowed: YAML in UTF-8"]) from None
    except OSError as error:
        raise StudyError([f"{path}: {error.strerror or error}; allowed: the path of a study's YAML file"]) from None
    try:
        root = _Loader(text).get_single_node()
    except RecursionError:
        raise StudyError([f"{path}:1: not a study: nested too deeply; allowed: a few levels"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise StudyError([f"{path}:{line}: not YAML: {_what(error)}; allowed: one YAML mapping, no tabs"]) from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise StudyError([f"{path}:1: not YAML: {reason}; allowed: one YAML mapping"]) from None
    if root is None:
        raise StudyError([f"{path}:1: the file is empty; allowed: a study, e.g. `model:`, `engine:`, `workloads:`"])
    lines = Lines(root.start_mark.line + 1)
    if not isinstance(root, yaml.MappingNode):
        raise StudyError([f"{path}:{lines.line}: not a mapping; allowed: `name: value` lines such as `model:`"])
    reader = _Reader()
    return StudyFile(path, reader.value(root, lines, ()), lines, reader.problems)


def show(value: Any) -> str:
    """A value as YAML writes it, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def allowed(names: Sequence[Any], given: Any = None) -> str:
    """ "; allowed: a, b, c", with the name nearest to `given` first where one is near."""
    words = [str(name) for name in names]
    near = nearest(given, words)
    hint = f"; did you mean {near}?" if near else ""
    listed = ", ".join(words) if len(words) <= 24 else f"{', '.join(words[:24])} and {len(words) - 24} more"
    return f"{hint}; allowed: {listed or 'none'}"


def nearest(given: Any, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that `given` is probably a misspelling of."""
    if not isinstance(given, str):
        return None
    by_plain = {name.lower().replace("-", "_"): name for name in names}
    found = difflib.get_close_matches(given.lower().replace("-", "_"), by_plain, n=1, cutoff=cutoff)
    return by_plain[found[0]] if found else None


class _Loader(yaml.SafeLoader):
    """PyYAML's reader with the scalars of YAML 1.2's core schema, and `1_000` for what it looks like."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


_INT = r"[-+]?[0-9]+(?:_[0-9]+)*"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": rf"{_INT}|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), None)


class _Reader:
    """Turns YAML nodes into values and lines, collecting what is wrong."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.open: set[int] = set()  # nodes being read: an alias to one of them would never end

    def value(self, node: yaml.Node, lines: Lines, loc: Loc) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, lines, loc)
        if id(node) in self.open:
            return self._wrong(lines.line, loc, "refers to itself; allowed: an alias to something that is complete")
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._wrong(lines.line, loc, f"the tag {node.tag} is not known; allowed: plain YAML values")
        self.open.add(id(node))
        found = self._mapping(node, lines, loc) if isinstance(node, yaml.MappingNode) else self._list(node, lines, loc)
        self.open.discard(id(node))
        return found

    def _list(self, node: yaml.Node, lines: Lines, loc: Loc) -> list[Any]:
        values = []
        for i, item in enumerate(node.value):
            lines.children[i] = Lines(item.start_mark.line + 1)
            values.append(self.value(item, lines.children[i], (*loc, i)))
        return values

    def _mapping(self, node: yaml.Node, lines: Lines, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key_node.tag != "tag:yaml.org,2002:str":
                self._wrong(
                    line,
                    loc,
                    f"the key {key or '(a list or mapping)'} is not a name; allowed: text, in quotes",
                )
            elif key in first_line:
                self._wrong(line, (*loc, key), f"given twice, first in line {first_line[key]}; allowed: each key once")
            else:
                first_line[key] = line
                lines.children[key] = Lines(line)
                values[key] = self.value(value_node, lines.children[key], (*loc, key))
        for other in merged:  # `<<: *base`: what is written here wins over what is merged in
            if not isinstance(other, yaml.MappingNode):
                self._wrong(other.start_mark.line + 1, (*loc, "<<"), "not a mapping; allowed: an alias to a mapping")
                continue
            below = Lines(other.start_mark.line + 1)
            for key, value in self.value(other, below, loc).items():
                if key not in values:
                    values[key], lines.children[key] = value, below.children[key]
        return values

    def _scalar(self, node: yaml.ScalarNode, lines: Lines, loc: Loc) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        if kind == "null":
            return None
        if kind in ("str", "merge"):
            return text
        if kind not in ("bool", "int", "float"):
            return self._wrong(lines.line, loc, f"the tag {node.tag} is not known; allowed: plain YAML values")
        try:
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2].lower() in ("0x", "0o") else int(text)
            number = float(re.sub(r"\.(inf|nan)\Z", r"\1", text.lower()))
        except (ValueError, KeyError):
            return self._wrong(lines.line, loc, f"{text!r} is not a {kind}; allowed: a value that its tag fits")
        if math.isnan(number):
            self._wrong(lines.line, loc, "NaN is not a number; allowed: a number")
        return number

    def _wrong(self, line: int, loc: Loc, text: str) -> None:
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        self.problems.append(Problem(line, key or "study", text))


def _what(error: yaml.MarkedYAMLError) -> str:
    return " ".join(part for part in (error.context, error.problem) if part)
