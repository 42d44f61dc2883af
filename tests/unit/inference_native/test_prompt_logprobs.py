"""Logprobs of prompts are those of the reference, in every schedule and with a warm cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.inference.conftest import RecordingReply
from tests.unit.inference_native.test_native_runner import PROMPTS, generate_all

from dynamo.core.codec import ReplyDecoder, ReplyEncoder
from dynamo.core.values import Finish, PromptTokenLogprob, Started
from dynamo.inference.native import prompt_logprobs

COUNT = 3
TOP = 2


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"num_blocks": 20}],
    ids=str,
)
async def test_they_are_the_reference_s(
    make_engine: Any,
    make_request: Any,
    reference_llama: Any,
    monkeypatch: Any,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_PER_SLICE", 16)
    engine = make_engine(**settings)
    info = await engine.start()
    assert "prompt_logprobs" in info.features
    await generate_all(engine, [make_request(prompt, COUNT) for prompt in PROMPTS])
    scored = [make_request(prompt, COUNT, prompt_logprobs=TOP) for prompt in PROMPTS]
    plain = [make_request(prompt, COUNT) for prompt in PROMPTS]
    replies = await generate_all(engine, [*scored, *plain])
    await engine.stop()
    for prompt, reply, other in zip(PROMPTS, replies, replies[len(PROMPTS) :], strict=False):
        assert reply.ids == other.ids
        assert reply.started.cached_tokens == 0
        assert other.end.prompt_logprobs == ()
        entries = reply.end.prompt_logprobs
        assert [entry.token for entry in entries] == prompt[1:]
        for logits, entry in zip(reference_llama.logits(prompt), entries, strict=False):
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)
            assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-4)
            assert entry.rank == best.tolist().index(entry.token) + 1
            assert [token for token, _ in entry.top] == best[:TOP].tolist()


async def test_a_resumed_request_has_those_of_the_prompt_alone(
    make_engine: Any, make_request: Any
) -> None:
    engine = make_engine()
    await engine.start()
    [whole] = await generate_all(engine, [make_request(PROMPTS[2], 6, prompt_logprobs=0)])
    rest = make_request(PROMPTS[2] + whole.ids[:4], 2, resumed=4, prompt_logprobs=0)
    [resumed] = await generate_all(engine, [rest])
    await engine.stop()
    assert len(whole.end.prompt_logprobs) == len(PROMPTS[2]) - 1
    for first, second in zip(whole.end.prompt_logprobs, resumed.end.prompt_logprobs, strict=True):
        assert first.token == second.token
        assert first.logprob == pytest.approx(second.logprob, abs=1e-4)


def test_they_pass_the_request_plane() -> None:
    reply = RecordingReply()
    entry = PromptTokenLogprob(5, -0.5, 2, ((7, -0.25),))
    payloads: list[bytes] = []

    def send(payload: bytes) -> bool:
        payloads.append(payload)
        return True

    encoder = ReplyEncoder(send, "w")
    encoder.begin(Started())
    encoder.finish(Finish("length", 1, prompt_logprobs=(entry,)))
    decoder = ReplyDecoder(reply)
    for payload in payloads:
        decoder.feed(payload)
    assert reply.end.prompt_logprobs == (entry,)
