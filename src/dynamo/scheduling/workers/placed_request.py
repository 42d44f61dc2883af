"""The entry of one attempt in the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState


class PlacedRequest:
    """An attempt of a request at a worker. Only the `Ledger` makes and changes entries.

    `key` is request/choice/attempt. `prompt_worker` computes the prompt. `worker` has the request
    now: that one, and from the first token on the one that answers. `decode_worker`: the worker to
    which it moves with its first token, if that is another one. `peer`: the router that sent the
    request; "" for this process. `open`: it has not ended.

    The prompt worker computes `new_tokens` of the prompt, after it has loaded blocks from its
    memory tiers for `load_ms`. Emitted tokens are counted by the token log of the answer, so that a
    token costs no call. `counted`: the request is part of its workers' sums. `updates_model`:
    measured times update their latency models. `load`: requests at the instance before this one.

    Admission's part: `kv_tokens` is the predicted size of the KV cache at the end,
    `predicted_first_token_s` is None without a queue, and `excess_ms` is how much longer than
    predicted the prompt may take.
    """

    __slots__ = (
        "_offset",
        "_token_log",
        "counted",
        "decode_worker",
        "ended_s",
        "excess_ms",
        "expected_first_token_s",
        "first_token_s",
        "hashes",
        "key",
        "kv_tokens",
        "load",
        "load_ms",
        "max_tokens",
        "new_tokens",
        "open",
        "output_tokens",
        "peer",
        "placed_s",
        "predicted_first_token_s",
        "prefill_ms_at_first_token",
        "prompt_tokens",
        "prompt_worker",
        "updates_model",
        "worker",
    )

    def __init__(
        self,
        key: str,
        worker: WorkerState,
        decode_worker: WorkerState | None,
        prompt: Prompt,
        new_tokens: int,
        max_tokens: int,
        now: float,
        peer: str = "",
    ) -> None:
        self._offset = 0
        self._token_log: Sequence[int] = ()
        self.key = key
        self.peer = peer
        self.open = True
        self.worker = self.prompt_worker = worker
        self.decode_worker = decode_worker
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.max_tokens = max_tokens
        self.load = self.output_tokens = 0
        self.load_ms = self.excess_ms = self.kv_tokens = 0.0
        self.placed_s = self.ended_s = self.expected_first_token_s = now
        self.first_token_s: float | None = None
        self.predicted_first_token_s: float | None = None
        self.prefill_ms_at_first_token = 0.0
        self.counted = False
        self.updates_model = True

    @property
    def answering(self) -> WorkerState:
        """The worker that answers, now or after the first token."""
        return self.decode_worker or self.worker

    @property
    def emitted(self) -> int:
        """Tokens that the worker has sent so far."""
        return self._offset + len(self._token_log)

    @emitted.setter
    def emitted(self, count: int) -> None:
        self._offset = count - len(self._token_log)

    def attach_token_log(self, token_log: Sequence[int]) -> None:
        """Count the tokens that are appended to `token_log` after this call."""
        self._offset += len(self._token_log) - len(token_log)
        self._token_log = token_log
