"""The collector's record of one routing decision."""

from __future__ import annotations

import msgspec


class RoutingRecord(msgspec.Struct, frozen=True, array_like=True):
    """A decision with its outcome. Shares of the prompt's blocks: held by the chosen worker
    (`cache_hit_ratio`), held by the best worker (`reachable_ratio`, None if not looked up),
    computed before (`seen_ratio`, None if not known). `achieved_ratio`: share of the prompt's
    tokens that the engine found in its cache. `timestamp`: Unix time. `decision_latency`: seconds,
    including the wait in the router. `worker_load`: requests at the chosen worker. `view`: mode of
    its cache view. `ttft_s`: None without a token."""

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
