"""Engine arguments read from vLLM's source text: annotations, aliases across modules, choices, and what they take."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from latency_lab import vllm_args
from latency_lab.vllm_args import Argument, EngineArguments, from_sources

SOURCES = {
    "engine/arg_utils.py": """
        from typing import TYPE_CHECKING, Annotated, Any, Callable, Literal, Optional, Union
        import torch
        from vllm.config import CacheDType as KV, SomeConfig
        from vllm.config.cache import Overrides
        from ..config.cache import Policy
        from elsewhere import Unknown

        if TYPE_CHECKING:
            from vllm.quant import Methods
        else:
            Methods = Any

        def helper(): pass

        class EngineArgs:
            '''Arguments.'''
            seqs: int | None = None
            share: float = SomeConfig.share
            eager: bool = False
            name: str = "x"
            old: Optional[int] = None
            older: Union[str, float, None] = None
            cache: KV = "auto"
            policy: Policy = "fcfs"
            quant: Methods | str | None = None
            ranks: Literal[1, 8] = 8
            nested: Literal["auto", KV] = "auto"
            sizes: list[int] | None = None
            names: set[str] = None
            overrides: Overrides = None
            executor: str | type[object] | None = None
            config: SomeConfig = None
            quoted: "dict[str, Any] | None" = None
            level: Annotated[int, "doc"] = 1
            dtype: str | torch.dtype = "auto"
            unknown: Unknown = None
            backend: "Backend | None" = None
            _private: int = 0
            count = 3

            def method(self) -> int:
                inner: int = 1
                return inner

        from vllm.backends import Backend

        class AsyncEngineArgs(EngineArgs):
            log_requests: bool = False
        """,
    "config/__init__.py": """
        from vllm.config.cache import CacheDType
        class SomeConfig:
            share: float = 0.9
        """,
    "config/cache.py": """
        from typing import Any, Callable, Literal, TypeAlias
        CacheDType = Literal["auto", "fp8"]
        Policy: TypeAlias = Literal["fcfs", "priority"]
        Overrides = dict[str, Any] | Callable[[Any], Any]
        """,
    "quant/__init__.py": """
        Methods = Literal["awq", "gptq"]
        """,
    "backends.py": """
        class Backend(Enum):
            FLASH = "a"
            TRITON = "b"
            lower = "c"
        """,
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> EngineArguments:
    package = tmp_path_factory.mktemp("site") / "vllm"
    for name, text in SOURCES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(textwrap.dedent(text))
    return from_sources(package, "9.9")


@pytest.mark.parametrize(
    ("name", "types", "choices"),
    [
        ("seqs", {"int", "None"}, None),
        ("share", {"float"}, None),
        ("eager", {"bool"}, None),
        ("name", {"str"}, None),
        ("old", {"int", "None"}, None),
        ("older", {"str", "float", "None"}, None),
        ("cache", set(), ("auto", "fp8")),
        ("policy", set(), ("fcfs", "priority")),
        ("quant", {"str", "None"}, ("awq", "gptq")),
        ("ranks", set(), (1, 8)),
        ("nested", set(), ("auto", "auto", "fp8")),
        ("sizes", {"list", "None"}, None),
        ("names", {"list"}, None),
        ("overrides", {"dict"}, None),
        ("executor", {"str", "None"}, None),
        ("config", {"any"}, None),
        ("quoted", {"dict", "None"}, None),
        ("level", {"int"}, None),
        ("dtype", {"str", "any"}, None),
        ("unknown", {"any"}, None),
        ("backend", {"None"}, ("FLASH", "TRITON")),
        ("log_requests", {"bool"}, None),
    ],
)
def test_annotations(known: EngineArguments, name: str, types: set[str], choices: tuple[Any, ...] | None) -> None:
    assert known.arguments[name] == Argument(name, frozenset(types), choices)


def test_only_public_annotated_fields_are_arguments(known: EngineArguments) -> None:
    assert known.version == "9.9"
    assert {"_private", "count", "inner", "method"}.isdisjoint(known.arguments)
    assert len(known.arguments) == 22
    assert [name for name, argument in known.arguments.items() if argument.open] == ["quant"]


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("seqs", 1e3, 1000),
        ("seqs", None, None),
        ("share", 1, 1.0),
        ("share", "inf", float("inf")),
        ("eager", "off", False),
        ("eager", "Yes", True),
        ("name", "off", "off"),
        ("cache", "fp8", "fp8"),
        ("quant", "their-plugin", "their-plugin"),
        ("ranks", 8.0, 8),
        ("sizes", [1, 2], [1, 2]),
        ("overrides", {"a": 1}, {"a": 1}),
        ("backend", "triton", "triton"),
        ("config", {"level": 3}, {"level": 3}),
        ("config", 3, 3),
        ("unknown", "off", False),
        ("unknown", "some", "some"),
    ],
)
def test_values_are_read_as_vllm_is_to_get_them(known: EngineArguments, name: str, value: Any, read: Any) -> None:
    found, wrong = known.check(name, value)
    assert (found, type(found), wrong) == (read, type(read), None)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("seqs", 1.5, "1.5 is not a value of seqs; allowed: a whole number, null (vLLM's default)"),
        ("seqs", True, "true is not a value of seqs"),
        ("seqs", "inf", "'inf' is not a value of seqs"),
        ("seqs", float("inf"), ".inf is not a value of seqs"),
        ("share", float("nan"), ".nan is not a value of share"),
        ("share", "0.5", "'0.5' is not a value of share; allowed: a number"),
        ("eager", 1, "1 is not a value of eager; allowed: true, false"),
        ("name", 3, "3 is not a value of name; allowed: text"),
        ("cache", "fp9", "did you mean fp8?; allowed: auto, fp8"),
        ("ranks", True, "true is not a value of ranks; allowed: 1, 8"),
        ("quant", "awqq", "did you mean awq?"),
        ("sizes", 3, "allowed: a list"),
        ("overrides", 3, "allowed: a mapping"),
        ("backend", "tritn", "did you mean TRITON?"),
        ("seq", 3, "vLLM 9.9 has no engine argument of this name; did you mean seqs?"),
        ("calculate_kv_scales", True, "(vLLM dropped it after 0.24)"),
    ],
)
def test_wrong_values_are_named_and_kept(known: EngineArguments, name: str, value: Any, says: str) -> None:
    found, wrong = known.check(name, value)
    assert found is value
    assert wrong is not None and says in wrong


def test_the_installed_vllm() -> None:
    known = vllm_args.installed()
    if known is None:
        pytest.skip("vLLM is not installed")
    assert known.version[0].isdigit()
    assert len(known.arguments) > 150
    for name, value in {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "max_model_len": "auto",
        "enable_chunked_prefill": False,
        "enable_prefix_caching": "off",
        "quantization": "fp8",
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "enforce_eager": True,
        "scheduling_policy": "priority",
        "hf_overrides": {"num_hidden_layers": 2},
        "gpu_memory_utilization": 0.9,
        "compilation_config": {"mode": 0},
        "distributed_executor_backend": "uni",
        "load_format": "dummy",
        "async_scheduling": False,
        "tensor_parallel_size": 2,
        "attention_backend": "FLASH_ATTN",
    }.items():
        assert known.check(name, value)[1] is None, name
    for name in ("dtype", "kv_cache_dtype", "scheduling_policy", "quantization"):
        assert known.arguments[name].choices, f"the choices of {name} are not found in this version's sources"
    assert known.check("scheduling_policy", "fifo")[1] is not None
