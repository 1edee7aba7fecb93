"""Models come from where a study says, whole, and every record can say which and whether its weights are real."""

import json
from types import SimpleNamespace

import pytest

from latency_lab import models


def source(kind, **values):
    return SimpleNamespace(source=kind, **values)


def test_a_published_config_has_random_weights_and_says_so(tmp_path):
    model = models.prepare(source("config", config="qwen3-4b-instruct-2507"), tmp_path)
    assert model.weights == "random"
    assert model.engine_args["load_format"] == "dummy"
    assert not model.has_tokenizer
    config = json.loads((models.published_config("qwen3-4b-instruct-2507") / "config.json").read_text())
    # As published: 36 layers of width 2560, 32 heads and 8 KV heads of 128.
    assert [config[name] for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads")] == [36, 2560, 8]


def test_random_prompts_stay_inside_the_vocabulary(tmp_path):
    tokens = models.Tokens(models.prepare(source("config", config="qwen3-4b-instruct-2507"), tmp_path))
    assert tokens.size == 151936
    assert min(tokens.usable) >= 0 and max(tokens.usable) < tokens.size
    with pytest.raises(ValueError, match="needs a tokenizer"):
        tokens.encode("hello", chat=True)


def test_an_unknown_config_names_the_known_ones(tmp_path):
    with pytest.raises(models.ModelError, match="qwen3-4b-instruct-2507, smollm2-135m-instruct"):
        models.prepare(source("config", config="qwen4"), tmp_path)


def test_a_folder_is_known_by_its_config_and_weights(tmp_path):
    with pytest.raises(models.ModelError, match=r"no config\.json"):
        models.prepare(source("folder", path=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = models.prepare(source("folder", path=str(tmp_path)), tmp_path)
    assert (first.weights, first.name) == ("real", tmp_path.name)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert models.prepare(source("folder", path=str(tmp_path)), tmp_path).digest != first.digest


def test_a_hub_model_is_passed_on_by_its_id(tmp_path):
    model = models.prepare(source("hub", id="Qwen/Qwen3-4B-Instruct-2507", revision="abc"), tmp_path)
    assert (model.location, model.revision, model.weights) == ("Qwen/Qwen3-4B-Instruct-2507", "abc", "real")


def test_the_small_model_is_converted_once_and_again_where_a_file_was_harmed(tmp_path, monkeypatch):
    converted = []

    def convert(gguf, target):
        converted.append(gguf.name)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "_convert_gguf", convert)
    folder = models.smollm2(tmp_path)
    assert models.smollm2(tmp_path) == folder and len(converted) == 1
    (folder / "model.safetensors").write_bytes(b"weightz")
    models.smollm2(tmp_path)
    assert len(converted) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == [models.SMOLLM2], "no half-made folder is left"


def test_a_conversion_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def convert(gguf, target):
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_convert_gguf", convert)
    with pytest.raises(OSError, match="No space"):
        models.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_gguf_is_the_one_expected(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_SMOLLM2_GGUF_SHA256", "0" * 64)
    with pytest.raises(models.ModelError, match="SHA-256 differs"):
        models.smollm2(tmp_path)


@pytest.mark.parametrize(
    ("weights", "args", "said"),
    [("real", {}, "real"), ("random", {}, "random"), ("real", {"load_format": "dummy"}, "random")],
)
def test_weights_that_the_engine_draws_are_called_random_whatever_the_model(weights, args, said):
    assert models.weights(models.Model("any", "any", weights, "0"), args) == said
