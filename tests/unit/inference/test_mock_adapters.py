"""LoRA adapters of the mock engine: what they change in answers, and what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.fake_lora import write_adapter
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, ModelNotFound
from dynamo.core.hashing import adapter_salt
from dynamo.inference.data_parallel import DataParallelEngine

NAMES = [f"a{number}" for number in range(8)]


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    return [f"{name}={write_adapter(tmp_path / name, name.encode())}" for name in NAMES]


async def answer(engine, request, adapter="", **changes):
    """Return the tokens of an answer, and how many tokens of the prompt were cached."""
    salt = adapter_salt(adapter, "") if adapter else ""
    reply = RecordingReply()
    request = replace(request, adapter=adapter, salt=salt, **changes)
    await engine.generate(request, Context("r"), reply)
    return reply.ids, reply.started.cached_tokens


async def test_answers_are_those_of_an_engine_with_that_adapter_alone(
    make_engine, make_request, modules
):
    request = make_request(range(64), max_tokens=9)
    together = make_engine(lora_modules=modules)
    await together.start()
    answers = {
        adapter: await answer(together, request, adapter) for adapter in together.adapters.paths
    }
    assert len({tuple(ids) for ids, _ in answers.values()}) == len(NAMES)
    plain = make_engine()
    await plain.start()
    assert await answer(plain, request) == await answer(together, request)
    for module, (adapter, ids) in zip(modules, answers.items(), strict=True):
        alone = make_engine(lora_modules=[module])
        await alone.start()
        assert list(alone.adapters.paths) == [adapter]
        assert await answer(alone, request, adapter) == ids
        await alone.stop()
    await together.stop()
    await plain.stop()


async def test_adapters_share_no_blocks(make_engine, make_request, modules):
    engine = make_engine(lora_modules=modules)
    await engine.start()
    request = make_request(range(64), max_tokens=1)
    for adapter in ("", *engine.adapters.paths):
        assert [(await answer(engine, request, adapter))[1] for _ in range(2)] == [0, 48]
    await engine.stop()


async def test_an_answer_continues_elsewhere_with_the_same_tokens(
    make_engine, make_request, modules
):
    engine = make_engine(lora_modules=modules)
    await engine.start()
    adapter = next(iter(engine.adapters.paths))
    whole, _ = await answer(engine, make_request(range(40), max_tokens=9), adapter)
    rest = make_request([*range(40), *whole[:4]], max_tokens=5, resumed=4)
    assert (await answer(engine, rest, adapter))[0] == whole[4:]
    await engine.stop()


async def test_an_adapter_that_is_not_loaded_is_an_unknown_model(
    make_engine, make_request, modules
):
    engine = DataParallelEngine([make_engine(lora_modules=modules) for _ in range(2)])
    await engine.start()
    adapter = next(iter(engine.adapters.paths))
    request = make_request(range(40), max_tokens=9)
    ids = [(await answer(engine, request, adapter, rank=rank))[0] for rank in range(2)]
    assert ids[0] == ids[1]
    await engine.adapters.unload("a0")
    for rank in range(2):
        with pytest.raises(ModelNotFound, match="LoRA adapter 'a0' is not loaded"):
            await answer(engine, request, adapter, rank=rank)
    await engine.stop()


async def test_a_folder_without_an_adapter_ends_the_start(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="is no LoRA adapter"):
        await make_engine(lora_modules=[f"a={tmp_path}"]).start()
