"""What a worker answers to a probe: proof that its engine computes."""

from __future__ import annotations

import msgspec

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Engine, Extra, Reply
from dynamo.core.values import Beat, Finish, GenerateRequest, Sampling, Started, Stops

PROBE = "probe"
CANARY = GenerateRequest(
    PROBE,
    "",
    pack_ids([0]),
    Sampling(temperature=0.0),
    Stops(max_tokens=1, ignore_eos=True),
    priority=1 << 20,
)

encode_beat = msgspec.msgpack.Encoder().encode


class Unread(Reply):
    """Nobody reads it."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: object, extra: Extra | None = None) -> bool:
        del ids, extra
        return True

    def finish(self, end: Finish) -> None:
        del end


async def beat(engine: Engine) -> Beat:
    """A busy engine shows what it has computed so far; an idle one computes a token first. Raises
    what the engine raises."""
    load = engine.load()
    if not load.running + load.waiting:
        await engine.generate(CANARY, Context(request_id=PROBE), Unread())
        load = engine.load()
    return Beat(load.steps, load.running + load.waiting)
