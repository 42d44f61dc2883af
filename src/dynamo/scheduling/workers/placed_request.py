"""A request on its worker, and the handle by which its progress is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState

EMPTY_PROMPT = Prompt(0, ())


class Placement:
    """The handle by which the router reports the progress of a placed request to its policy. `id`
    is unique in this process; the worker must compute `new_tokens` of the prompt, after it has
    loaded blocks from its memory tiers for `load_ms`. Emitted tokens are counted by the request's
    token log, so that a token costs no call."""

    __slots__ = (
        "_offset",
        "_token_log",
        "first_token_s",
        "hashes",
        "id",
        "load_ms",
        "new_tokens",
        "prompt_tokens",
    )

    def __init__(
        self,
        id: str = "",  # noqa: A002
        prompt: Prompt = EMPTY_PROMPT,
        new_tokens: int = 0,
    ) -> None:
        self._offset = 0
        self._token_log: Sequence[int] = ()
        self.id = id
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.load_ms = 0.0
        self.first_token_s: float | None = None

    @property
    def emitted(self) -> int:
        """Tokens that the worker has sent so far."""
        return self._offset + len(self._token_log)

    @emitted.setter
    def emitted(self, count: int) -> None:
        self._offset = count - len(self._token_log)

    def attach_token_log(self, token_log: Sequence[int]) -> None:
        """Count the tokens that are appended to `token_log` after this call."""
        self._offset, self._token_log = self.emitted - len(token_log), token_log

    def on_first_token(self) -> None:
        """Called once, before the first tokens are counted."""

    def end(self) -> None:
        """Called once, when the request has left its worker for any reason."""


class PlacedRequest(Placement):
    """A request on its worker, until it ends. `counted`: whether it is part of its worker's sums.
    `updates_model`: whether measured times update the latency model. `decode_worker`: the worker to
    which the request moves with its first token, if that is another one. The callbacks receive this
    object."""

    __slots__ = (
        "counted",
        "decode_worker",
        "end_callback",
        "expected_first_token_s",
        "first_token_callback",
        "placed_s",
        "prefill_ms_at_first_token",
        "updates_model",
        "worker",
    )

    def __init__(
        self, request_key: str, worker: WorkerState, prompt: Prompt, new_tokens: int, now: float
    ) -> None:
        super().__init__(request_key, prompt, new_tokens)
        self.worker = worker
        self.counted = False
        self.decode_worker: WorkerState | None = None
        self.placed_s = now
        self.expected_first_token_s = now
        self.prefill_ms_at_first_token = 0.0
        self.updates_model = True
        self.first_token_callback: Callable[[PlacedRequest], None] = _ignore
        self.end_callback: Callable[[PlacedRequest], None] = _ignore

    def on_first_token(self) -> None:
        self.first_token_callback(self)

    def end(self) -> None:
        self.end_callback(self)


def _ignore(placed: PlacedRequest) -> None:
    del placed
