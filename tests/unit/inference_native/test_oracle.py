"""The default model against transformers on the same weights: 20 prompts, 64 greedy tokens each.

Tokens may differ only if the reference's two best logits are closer than NEAR_TIE. Such positions
are counted, and the comparison continues after the reference's own token. `make oracle` creates the
references again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.resolve import ModelFiles, resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer

NEAR_TIE = 1e-3
MAX_TIES = 3
ORACLE_FOLDER = Path(__file__).parents[2] / "data" / "oracle"
ANSWERS = json.loads((ORACLE_FOLDER / "greedy.json").read_text())["answers"]
PROMPTS = json.loads((ORACLE_FOLDER / "prompts.json").read_text())
SHORT = [answer for answer in ANSWERS if len(answer["prompt_ids"]) < 100]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    try:
        return resolve_model_blocking(ensure_verified=False)
    except ModelUnavailable as error:
        pytest.skip(f"the default model is not cached and cannot be downloaded: {error.message}")


class OracleComparison:
    """Generates answers and compares them with the reference."""

    def __init__(self, engine: BatchedEngine, make_request: Any) -> None:
        self.engine = engine
        self.make_request = make_request
        self.ties: set[tuple[str, int]] = set()

    async def compare(self, *answers: dict[str, Any], tokens: int = 64) -> None:
        await run_all(*(self.compare_answer(answer, tokens) for answer in answers))

    async def compare_answer(self, answer: dict[str, Any], tokens: int) -> None:
        """Compare all tokens, continuing with the reference's own token after a near tie."""
        expected, compared = answer["ids"][:tokens], 0
        while compared < tokens:
            reply = RecordingReply()
            context = answer["prompt_ids"] + expected[:compared]
            request = self.make_request(
                context, tokens - compared, resumed=compared, top_logprobs=5
            )
            await self.engine.generate(request, Context("r"), reply)
            self.check_logprobs(answer, reply, compared)
            equal_tokens = next(
                (
                    i
                    for i, pair in enumerate(zip(reply.ids, expected[compared:], strict=True))
                    if pair[0] != pair[1]
                ),
                tokens - compared,
            )
            compared += equal_tokens
            if compared < tokens:
                assert answer["gaps"][compared] < NEAR_TIE, (
                    f"{answer['name']}: token {compared} differs"
                )
                self.ties.add((answer["name"], compared))
                compared += 1

    def check_logprobs(self, answer: dict[str, Any], reply: Any, compared: int) -> None:
        for step, top in answer["logprobs"].items():
            index = int(step) - compared
            if (
                0 <= index < len(reply.ids)
                and reply.ids[:index] == answer["ids"][compared : int(step)]
            ):
                logprobs = dict(reply.extras[index].top)
                expected = {token: logprob for token, logprob in top if token in logprobs}
                assert len(expected) >= 4
                assert {token: logprobs[token] for token in expected} == pytest.approx(
                    expected, abs=2e-3
                )


async def open_comparison(
    model: ModelFiles, make_request: Any, **settings: Any
) -> OracleComparison:
    engine = BatchedEngine(NativeRunner(model.open_weights, EngineSettings(**settings)))
    await engine.start()
    return OracleComparison(engine, make_request)


async def test_twenty_prompts_computed_then_from_the_cache(
    model: ModelFiles, make_request: Any
) -> None:
    comparison = await open_comparison(
        model, make_request, num_blocks=600, max_num_batched_tokens=300
    )
    await comparison.compare(*ANSWERS)
    assert comparison.engine.scheduler.preemptions == 0
    cached = comparison.engine.counters.cached_tokens
    await comparison.compare(*ANSWERS, tokens=8)
    assert comparison.engine.counters.cached_tokens - cached > 2_000
    await comparison.compare(ANSWERS[0], tokens=16)
    assert len(comparison.ties) <= MAX_TIES
    await comparison.engine.stop()


async def test_preemption_and_eviction_change_no_token(
    model: ModelFiles, make_request: Any
) -> None:
    comparison = await open_comparison(
        model, make_request, num_blocks=28, max_num_batched_tokens=100
    )
    for _ in range(2):
        await comparison.compare(*SHORT[:8], tokens=24)
    assert comparison.engine.scheduler.preemptions > 0
    assert comparison.engine.scheduler.pool.evictions > 0
    assert len(comparison.ties) <= MAX_TIES
    await comparison.engine.stop()


def test_rendered_prompts_and_decoded_texts(model: ModelFiles) -> None:
    card = model.build_card()
    tokenizer = load_tokenizer(card.tokenizer)
    template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        text = template.render(prompt["messages"])
        assert list(unpack_ids(tokenizer.encode(text))) == answer["prompt_ids"]
        ids = answer["ids"]
        length = next((i for i, token in enumerate(ids) if token in card.eos_token_ids), len(ids))
        assert tokenizer.decode(ids[:length]) == answer["text"]
