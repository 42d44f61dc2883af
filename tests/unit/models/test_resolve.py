"""Resolution of models from folders, files and the hub."""

import asyncio
import json
import shutil
import time

import msgspec
import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ModelUnavailable
from dynamo.core.values import SamplingParams
from dynamo.models import resolve
from dynamo.models.card import ModelCard
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.safetensors import SINGLE_FILE
from dynamo.models.file_cache import find_file
from dynamo.models.metadata import metadata_from_gguf
from dynamo.models.resolve import resolve_model, resolve_model_blocking


async def test_a_folder_without_weights(model_folder):
    files = await resolve_model(str(model_folder), ensure_verified=False)
    with pytest.raises(ModelUnavailable, match="no weights"):
        files.open_weights()
    card = files.build_card()
    assert card.names == ("tiny-model",)
    assert card.name == "tiny-model"
    assert card.context_tokens == 256
    assert card.eos_token_ids == (2, 0)
    assert (card.bos_token, card.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert card.chat_template == "{{ bos_token }}{{ messages[0].content }}"
    assert card.generation == {"temperature": 0.2, "top_k": 7}
    assert abs(card.created - time.time()) < 60
    assert find_file(card.tokenizer) == model_folder / "tokenizer.json"


async def test_settings_override_the_metadata(model_folder):
    files = await resolve_model(str(model_folder), ensure_verified=False)
    card = files.build_card(names=("a", "b"), context_tokens=64, block_tokens=32)
    assert (card.names, card.context_tokens, card.block_tokens) == (("a", "b"), 64, 32)


async def test_a_gguf_file(write_gguf):
    path = write_gguf()
    files = await resolve_model(str(path), ensure_verified=False)
    card = files.build_card()
    assert card.name == "tiny"
    assert card.context_tokens == 256
    assert card.eos_token_ids == (2, 0)
    assert card.bos_token == "<|im_start|>"
    assert "m.content" in card.chat_template
    assert card.tokenizer.name == "tokenizer.json"
    with files.open_weights() as weights:
        assert weights.config.vocab_size == card.vocab_size


def test_tokens_that_end_turns_end_answers_though_gguf_names_another(write_gguf):
    texts = ["x", "<|endoftext|>", "<|im_end|>", "<|end|>", "<end>", "<|return|>"]

    def ends(names: list[str]) -> set[str]:
        values = {"tokenizer.ggml.tokens": names, "tokenizer.ggml.eos_token_id": 1}
        with GgufFile(write_gguf(values)) as file:
            return {names[number] for number in metadata_from_gguf(file).eos_token_ids}

    assert ends(texts) == {"<|endoftext|>", "<|im_end|>", "<|end|>", "<|return|>"}
    harmony = [*texts, "<|call|>"]
    assert ends(harmony) == {"<|endoftext|>", "<|im_end|>", "<|return|>", "<|call|>"}


def test_max_new_tokens_is_read_and_checked(model_folder):
    path = model_folder / "generation_config.json"
    path.write_text('{"max_new_tokens": 99}')
    assert resolve_model_blocking(
        str(model_folder), ensure_verified=False
    ).build_card().generation == {"max_new_tokens": 99}
    path.write_text('{"max_new_tokens": -1}')
    with pytest.raises(ModelUnavailable, match="max_new_tokens"):
        resolve_model_blocking(str(model_folder), ensure_verified=False)


@pytest.mark.parametrize("top_k", [20, 20.0])
def test_sampling_defaults_keep_their_types_when_encoded(model_folder, top_k):
    generation = {"temperature": 1, "top_p": 0.8, "top_k": top_k, "min_p": None, "do_sample": True}
    (model_folder / "generation_config.json").write_text(json.dumps(generation))
    card = resolve_model_blocking(str(model_folder), ensure_verified=False).build_card()
    for _ in range(2):
        assert card.generation == {"temperature": 1.0, "top_p": 0.8, "top_k": 20}
        sampling = SamplingParams(**card.generation)
        assert (
            msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
            == sampling
        )
        card = msgspec.json.decode(msgspec.json.encode(card), type=ModelCard)


def test_a_wrong_vocabulary_size_in_gguf_is_ignored(write_gguf):
    card = resolve_model_blocking(
        str(write_gguf({"llama.vocab_size": "many"})), ensure_verified=False
    ).build_card()
    assert card.vocab_size > 256


async def test_a_folder_with_weights(model_folder, write_safetensors, arrays):
    write_safetensors(model_folder / SINGLE_FILE, arrays)
    files = await resolve_model(str(model_folder), ensure_verified=False)
    files.open_weights().close()


def test_a_folder_needs_only_a_tokenizer(model_folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    (model_folder / "chat_template.jinja").write_text("from a file")
    card = resolve_model_blocking(str(model_folder), ensure_verified=False).build_card()
    assert card.context_tokens == 4096
    assert card.vocab_size > 256
    assert card.eos_token_ids == ()
    assert card.chat_template == "from a file"


def test_named_templates_and_special_tokens_are_found_in_all_files(model_folder):
    def card():
        return resolve_model_blocking(str(model_folder), ensure_verified=False).build_card()

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tokens = {"chat_template": named, "eos_token": None, "pad_token": {"content": "<pad>"}}
    extra = {"extra_special_tokens": {"tool_token": "<tool>"}}
    (model_folder / "chat_template.jinja").unlink(missing_ok=True)
    (model_folder / "tokenizer_config.json").write_text(json.dumps(tokens | extra))
    mapped = {"eos_token": "<|end|>", "pad_token": "<other>"}
    (model_folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    assert (card().chat_template, card().tool_template) == ("d", "t")
    assert card().eos_token == "<|end|>"
    assert card().special_tokens == {"tool_token": "<tool>", "pad_token": "<pad>"}
    folder = model_folder / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("file")
    assert (card().chat_template, card().tool_template) == ("d", "file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", '{"eos_token_id": "two", "max_position_embeddings": -1}', ""),
        ("config.json", '{"text_config": 7, "max_position_embeddings": 0}', ""),
        ("generation_config.json", '{"temperature": "hot"}', "usable model"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", '{"chat_template": [1, {"name": {}}]}', ""),
        ("chat_template.jinja", "\xff", "cannot be read"),
    ],
)
def test_malformed_metadata_files(model_folder, name, content, message):
    (model_folder / name).write_text(content, encoding="latin-1")
    if not message:
        assert resolve_model_blocking(
            str(model_folder), ensure_verified=False
        ).build_card().context_tokens in {256, 4096}
        return
    with pytest.raises(ModelUnavailable, match=message):
        resolve_model_blocking(str(model_folder), ensure_verified=False)


@pytest.mark.parametrize("spec", ["./none", "/no/such/place", "~/none", "a/b/c", "none.gguf/x/y"])
def test_missing_paths_are_refused(spec):
    with pytest.raises(ModelUnavailable, match="no file or folder"):
        resolve_model_blocking(spec)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelUnavailable, match="no tokenizer"):
        resolve_model_blocking(str(tmp_path))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelUnavailable, match="GGUF files") as caught:
        resolve_model_blocking(str(tmp_path))
    assert str(tmp_path / "some.gguf") in caught.value.hint


def test_the_hint_without_hub_names_local_models(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelUnavailable, match="offline") as caught:
        resolve_model_blocking("someone/something")
    assert "model folder" in caught.value.hint


def test_a_model_in_the_cache_of_the_hub_s_own_client_is_used(monkeypatch, tmp_path, model_folder):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--someone--something"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    shutil.copytree(model_folder, folder / "snapshots" / "abc")
    files = resolve_model_blocking("someone/something", with_weights=False, ensure_verified=False)
    assert files.build_card().name == "someone/something"
    assert files.path == folder / "snapshots" / "abc"
    with pytest.raises(ModelUnavailable, match="offline"):  # no weights are there
        resolve_model_blocking("someone/something", ensure_verified=False)


async def test_cancellation_stops_a_download(monkeypatch):
    started, ended, stops = asyncio.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def slow(spec, progress, with_weights, stopped):
        loop.call_soon_threadsafe(started.set)
        stops.append(stopped.wait(30))
        loop.call_soon_threadsafe(ended.set)
        raise ModelUnavailable("the download was stopped")

    monkeypatch.setattr(resolve, "_locate_and_fetch", slow)
    task = loop.create_task(resolve_model("", clock=SystemClock()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended.wait()
    assert stops == [True]
