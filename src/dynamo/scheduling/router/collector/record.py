"""One routing decision, as the collector keeps it."""

from __future__ import annotations

import msgspec


class RoutingRecord(msgspec.Struct, frozen=True, array_like=True):
    """`timestamp`: Unix time. Ratios are shares of the prompt's blocks: held by the worker that was
    chosen (`cache_hit_ratio`), by the best of all (`reachable_ratio`; None = nobody looked), and
    ever computed before by anybody (`seen_ratio`; None = not known); of its tokens those that the
    engine found in the end (`achieved_ratio`). `decision_latency`: seconds, waiting in the router
    included; `worker_load`: requests at the chosen worker; `ttft_s`: None = no token came."""

    timestamp: float
    request_id: str
    selected_worker: str
    cache_hit_ratio: float
    decision_latency: float
    worker_load: float
    queue_length: int
    prompt_blocks: int = 1
    reachable_ratio: float | None = None
    seen_ratio: float | None = None
    achieved_ratio: float | None = None
    view: str = ""
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    output_tokens: int = 0
    failed: bool = False


pack_record = msgspec.msgpack.Encoder().encode
unpack_record = msgspec.msgpack.Decoder(RoutingRecord).decode
