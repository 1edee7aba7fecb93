"""What a study's file is made of: mappings without unknown keys, numbers, names, texts.

Where one is wrong, a sentence says what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from latency_lab.study_file import show
from latency_lab.vllm_args import WORDS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
LARGEST = 2**31 - 1  # of the records' columns
SLO_KEY = re.compile(r"(ttft|tpot|itl|e2e)_(mean|max|p\d\d?)_s")


class Unknown:
    """Marks the value of a key that a mapping does not know, so that the error can name the known ones."""

    def __init__(self, value: Any, known: list[str]) -> None:
        self.value, self.known = value, known


class Strict(BaseModel):
    """A mapping without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _mark_unknown_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = list(cls.model_fields)
        return {key: value if key in names else Unknown(value, names) for key, value in data.items()}


def wrong(text: str) -> PydanticCustomError:
    return PydanticCustomError("study", "{text}", {"text": text})


def wrong_at(key: Any, text: str) -> ValidationError:
    """The same for one key (or position) of the value that is being checked."""
    details = InitErrorDetails(type=wrong(text), loc=(key,), input=None)
    return ValidationError.from_exception_data("study", [details])


def _number(
    low: float, high: float = LARGEST, *, above: bool = False, infinite: bool = False, whole: bool = False
) -> Callable[[Any], Any]:
    """A validator of numbers from `low` (`above`: greater than it) to `high` that reads `inf` as YAML's `.inf`."""
    kind = "a whole number" if whole else "a number"
    bound = f"{'above' if above else 'from'} {low:g}{' on' * (not above)}"
    ending = f"; allowed: {kind} {bound}{', or inf' if infinite else ''}"

    def check(value: Any) -> Any:
        number = value
        if isinstance(value, str) and value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
            number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise wrong(f"{show(value)} is not {kind}{ending}")
        if isinstance(number, float) and not math.isfinite(number) and not (infinite and number > 0):
            raise wrong(f"{show(number)} is not finite{ending}")
        if number > high and number != math.inf:
            raise wrong(f"{show(value)} is too large{ending} and up to {high:.15g}")
        if whole and not float(number).is_integer():
            raise wrong(f"{show(value)} is not whole{ending}")
        if number < low or (above and number == low):
            raise wrong(f"{show(value)} is too small{ending}")
        return int(number) if whole else float(number)

    return check


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise wrong(f"{show(value)} is neither true nor false; allowed: true, false, on, off")


def listed(value: Any) -> Any:
    """One value as a list of one."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise wrong("the list is empty; allowed: one value, or a list of at least one")
    for i, item in enumerate(values):
        if any(item == other and isinstance(item, bool) == isinstance(other, bool) for other in values[:i]):
            raise wrong_at(i, f"{show(item)} is given twice; allowed: each value once")
    return values


def _name(value: Any) -> str:
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    raise wrong(f"{show(value)} is no name; allowed: letters, digits, and _ . + - after the first")


def _text(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise wrong(f"{show(value)} is not text; allowed: text (a number or true needs quotes)")


def mapping(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    raise wrong(f"{show(value)} is not a mapping; allowed: `name: value` lines, or {{name: value}}")


def named_mapping(value: Any) -> Any:
    """A mapping from names that we choose (workloads, settings, classes)."""
    for key in mapping(value):
        if not NAME.fullmatch(key):
            raise wrong_at(key, f"{key!r} is no name; allowed: letters, digits, and _ . + - after the first")
    if not value:
        raise wrong("is empty; allowed: at least one")
    return value


def _slo(value: Any) -> dict[str, float]:
    for key in mapping(value):
        if not SLO_KEY.fullmatch(key):
            raise wrong_at(
                key,
                f"{key!r} is not a target; allowed: METRIC_STATISTIC_s, METRIC one of ttft, tpot, itl, e2e, "
                "STATISTIC one of mean, max, p50, p95, ...",
            )
    return TypeAdapter(dict[str, Positive]).validate_python(value)


def _environment(value: Any) -> dict[str, str]:
    """Variables as in a shell: whole numbers without a point, booleans as vLLM's 1 and 0, null left out."""
    found = {}
    for key, item in mapping(value).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise wrong_at(key, f"{key!r} is no environment variable; allowed: letters, digits and _")
        if re.search(r"TOKEN$|SECRET|PASSWORD|API_KEY", key):
            raise wrong_at(
                key, f"{key!r} looks like a secret, and records keep all of this; allowed: set it in your shell"
            )
        if isinstance(item, list | dict):
            raise wrong_at(key, f"{show(item)} is not one value; allowed: text or a number")
        if isinstance(item, float) and item.is_integer():
            item = int(item)
        if item is not None:
            found[key] = str(int(item)) if isinstance(item, bool) else str(item)
    return found


Count = Annotated[int, BeforeValidator(_number(1, whole=True))]
CountFromZero = Annotated[int, BeforeValidator(_number(0, whole=True))]
Priority = Annotated[int, BeforeValidator(_number(-(2**31), whole=True))]
Positive = Annotated[float, BeforeValidator(_number(0, above=True))]
FromZero = Annotated[float, BeforeValidator(_number(0))]
Level = Annotated[float, BeforeValidator(_number(0.5, 0.999))]
Real = Annotated[float, BeforeValidator(_number(-LARGEST))]
Sigma = Annotated[float, BeforeValidator(_number(0, 10))]
Rate = Annotated[float, BeforeValidator(_number(0, above=True, infinite=True))]
Flag = Annotated[bool, BeforeValidator(_flag)]
Name = Annotated[str, BeforeValidator(_name)]
Text = Annotated[str, BeforeValidator(_text)]
Free = Annotated[dict[str, Any], BeforeValidator(mapping)]
Slo = Annotated[dict[str, float], PlainValidator(_slo)]
Environment = Annotated[dict[str, str], PlainValidator(_environment)]
