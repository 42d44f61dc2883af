"""Messages of a prefill worker that is broken or hostile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.unit.inference_disaggregation.pair import Pair, make_request, with_pair

from dynamo.core.errors import ProtocolError
from dynamo.inference.disaggregation.messages import receive_prefill
from dynamo.inference.kv_source import FirstToken, PrefillSink


class _Ignored(PrefillSink):
    def on_queued(self, tokens: int) -> None:
        pass

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        return True

    def on_first_token(self, first: FirstToken) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"b", (0, [1, 2], [1])),
        (b"b", (0, [1], [-1])),
        (b"b", (0, [-1], [1])),
        (b"b", (-1, [1], [1])),
        (b"b", (0, [1])),
        (b"f", [-1]),
        (b"f", [1, None, -5]),
        (b"q", -1),
        (b"q", "many"),
        (b"x", []),
        (b"", []),
    ],
)
def test_impossible_messages_are_refused(kind: bytes, body: Any) -> None:
    with pytest.raises(ProtocolError):
        receive_prefill(_Ignored(), kind + msgspec.msgpack.encode(body))


def test_a_token_outside_the_vocabulary_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(pair: Pair) -> None:
        scheduler = pair.d.engine.scheduler
        scheduler.limits = msgspec.structs.replace(scheduler.limits, vocab_size=1000)
        alone = await pair.answer(make_request(range(40), prefill=""))
        pair.d.engine.clear_prefix_cache()
        monkeypatch.setattr(
            "dynamo.inference.requests.prefill_calls.FirstToken",
            lambda token, *rest: FirstToken(token + 1000, *rest),
        )
        assert (await pair.answer(make_request(range(40)))).ids == alone.ids
        assert pair.arrivals.fallbacks == {ProtocolError.code: 1}

    with_pair(main)


def test_a_prompt_of_another_salt_is_no_hit_at_either_worker() -> None:
    async def main(pair: Pair) -> None:
        for salt, cached in (("tenant-1", 0), ("tenant-2", 0), ("tenant-1", 36), ("", 0)):
            reply = await pair.answer(make_request(range(40), salt=salt))
            assert reply.started is not None
            assert reply.started.cached_tokens == cached

    with_pair(main)
