"""The script engine: which recorded answer it sends, in which steps, and how a script is refused."""

from __future__ import annotations

import json
from random import Random

import pytest
from tests.support.sentencepiece import write_tokenizer
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids, unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.inference.script.engine import read_script
from dynamo.models.resolve import resolve_model
from dynamo.models.tokenization.tokenizer import load_tokenizer

LINES = [
    {"when": "fox", "text": "jumps over<|im_end|> the lazy dog"},
    {"when": "cut", "text": "the quick brown fox", "cut": 2},
    {"when": "ids", "ids": [5, 6, 7]},
]


async def answer(tiny_model, script, prompt, *, tokens_per_step="1", seed=0):
    """Return the reply of a script engine, and its tokenizer."""
    files = await resolve_model(str(tiny_model))
    engine_settings = EngineSettings(
        kind="script", script=str(script), tokens_per_step=tokens_per_step
    )
    inputs = EngineInputs(
        Settings(engine=engine_settings), files.build_card(), files, SystemClock()
    )
    engine = await open_engine("script", inputs)
    await engine.start()
    tokenizer, reply = load_tokenizer(files.tokenizer), StepReply()
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=tokenizer.encode(prompt),
        sampling=SamplingParams(seed=seed),
        stops=StopConditions(max_tokens=1000, stop_token_ids=(2,)),
    )
    await engine.generate(request, Context("r"), reply)
    return reply, tokenizer


class StepReply(RecordingReply):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def tokens(self, ids, logprobs=None):
        self.steps.append(len(ids))
        return super().tokens(ids, logprobs)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


async def test_the_first_line_that_fits_answers_with_its_special_tokens(tiny_model, script):
    reply, tokenizer = await answer(tiny_model, script, "a quick fox")
    assert tokenizer.decode(reply.ids) == LINES[0]["text"]
    assert 2 in reply.ids
    assert reply.end.reason == "stop"
    assert set(reply.steps) == {1}


def test_a_text_has_no_space_that_its_line_has_not(tmp_path, script):
    """Tokenizers that put a space before each text encode it as the middle of one."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "llama"))
    answers = read_script(script, tokenizer)
    assert tokenizer.decode_behind_text(answers[0].ids) == LINES[0]["text"]


async def test_a_cut_answer_ends_by_length(tiny_model, script):
    reply, tokenizer = await answer(tiny_model, script, "please cut")
    assert reply.ids == list(unpack_ids(tokenizer.encode(LINES[1]["text"]))[:2])
    assert reply.end.reason == "length"


async def test_a_line_may_give_ids(tiny_model, script):
    reply, _ = await answer(tiny_model, script, "with ids")
    assert reply.ids == [5, 6, 7]


async def test_a_prompt_without_a_line_is_echoed(tiny_model, script):
    reply, tokenizer = await answer(tiny_model, script, "nothing else")
    assert pack_ids(reply.ids) == tokenizer.encode("nothing else")


async def test_steps_have_sizes_of_the_request_s_seed(tiny_model, script):
    reply, _ = await answer(tiny_model, script, "a fox", tokens_per_step="1-3", seed=7)
    random = Random(7)
    assert reply.steps[:-1] == [random.randint(1, 3) for _ in reply.steps[:-1]]
    assert max(reply.steps) > 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1: "), ('{"text": "x"}', "missing required field `when`"), ("[]", "line 1")],
)
async def test_a_line_that_is_no_script_is_refused_with_its_number(
    tiny_model, tmp_path, line, message
):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        await answer(tiny_model, path, "x")


async def test_a_missing_script_is_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        await answer(tiny_model, tmp_path / "none", "x")
    with pytest.raises(ConfigError) as caught:
        await answer(tiny_model, "", "x")
    assert "--script FILE" in caught.value.hint


@pytest.mark.parametrize("text", ["0", "2", "1-0", "1-65", "8-1", "x", ""])
async def test_a_wrong_range_of_tokens_is_refused(tiny_model, script, text):
    with pytest.raises(ConfigError, match="tokens_per_step"):
        await answer(tiny_model, script, "x", tokens_per_step=text)
