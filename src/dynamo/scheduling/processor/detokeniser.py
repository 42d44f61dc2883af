"""One choice's way back: token ids in, text out. The hot path of the frontend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dynamo.core.reply import Extra, Reply, Shortcut
from dynamo.core.text import Lane, TextFinish, TextOptions, TextReply, TokenText, Words
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.scheduling.processor.stops import StopScan, StopStrings
from dynamo.scheduling.processor.vocabulary import TextDecoder, Vocabulary


class Detokeniser(Reply):
    """Turns one choice's tokens into text as they come; every token stays a delta of its own.

    Text waits only while a character is incomplete or a stop string may have begun; logprobs wait
    with it. A stop string ends the choice here and, by the False upward, the engine's work.
    """

    __slots__ = (
        "_chars",
        "_choice",
        "_count",
        "_decoder",
        "_echo",
        "_lane",
        "_logprobs",
        "_min_tokens",
        "_pieces",
        "_plain",
        "_reply",
        "_rest",
        "_risky",
        "_scan",
        "_shown_stop",
        "_skipped",
        "_stop_ids",
        "_texts",
        "_vocabulary",
    )

    def __init__(
        self,
        choice: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        stops: StopStrings | None,
        reply: TextReply,
        echo: str = "",
    ) -> None:
        self._choice = choice
        self._reply = reply
        self._vocabulary = vocabulary
        skip = options.skip_special_tokens
        self._texts = vocabulary.texts if skip else vocabulary.shown
        self._skipped = vocabulary.special_ids if skip else frozenset[int]()
        self._decoder: TextDecoder | None = None  # most answers need none
        self._scan = None if stops is None else StopScan(stops)
        self._risky = None if stops is None else stops.may_begin
        self._shown_stop = options.include_stop
        self._stop_ids = options.stop_token_ids
        self._min_tokens = options.min_tokens
        self._echo = echo
        self._count = 0
        self._chars = 0  # of tokens with logprobs
        self._lane: Lane | None = None
        self._plain = True
        self._pieces: list[tuple[str, list[TokenText] | None]] = []
        self._rest = ""
        self._logprobs: list[TokenText] = []

    def begin(self, started: Started) -> None:
        self._reply.begin(self._choice, started)
        if self._echo:
            self._reply.text(self._choice, self._echo)

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        if self._plain and extra is None and len(ids) == 1:
            try:
                text = self._texts[ids[0]]
            except IndexError:
                text = None
            risky = self._risky
            if text is not None and (risky is None or risky(text) is None):
                self._count += 1
                return self._reply.text(self._choice, text)
        if extra is None:
            return all(self._take(token) for token in ids)
        return all(map(self._take, ids, extra))

    def shortcut(self, kept: array[int] | None = None) -> Shortcut | None:
        self._count = self._so_far()
        self._lane = lane = self._reply.lane(self._choice, Words(self._texts, self._risky), kept)
        if lane is None:
            return None
        lane.plain = self._plain
        return lane.token

    def finish(self, end: Finish) -> None:
        stop = end.stop_token
        if self._shown_stop and stop is not None and not self._show(stop):
            return
        if self._plain or self._say_all():
            self._end(end, stop if stop in self._stop_ids else None)

    def _take(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        self._count += 1
        return self._show(token, logprobs)

    def _show(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        if token in self._skipped:
            return True
        if logprobs is not None:
            self._logprobs.append(self._in_text(logprobs))
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = self._vocabulary.decoder(skip_special=bool(self._skipped))
        text = decoder.step(token)
        self._chars += len(text)
        going_on = self._say(text) if text else True
        self._plain = not (self._pieces or self._rest or self._logprobs or decoder.waiting)
        if self._lane is not None:
            self._lane.plain = self._plain
        return going_on

    def _so_far(self) -> int:
        return self._count if self._lane is None else self._count + self._lane.count

    def _say(self, text: str) -> bool:
        """Let out what may go out. False: the choice has ended, or its reader is gone."""
        logprobs, self._logprobs = self._logprobs or None, []
        if self._scan is None:
            return self._reply.text(self._choice, text, logprobs)
        self._pieces.append((self._rest + text, logprobs))
        self._rest = ""
        free, stop = self._scan.feed(text, armed=self._so_far() > self._min_tokens)
        if not self._release(free):
            return False
        if stop is None:
            return True
        self._end(Finish("stop"), stop)
        return False

    def _release(self, free: int) -> bool:
        """Let out `free` characters, each token's as a delta of its own; the rest of one that must
        be cut goes out with the next."""
        while free and self._pieces:
            text, logprobs = self._pieces.pop(0)
            self._keep(text[free:])
            if not self._reply.text(self._choice, text[:free], logprobs):
                return False
            free -= min(free, len(text))
        return True

    def _keep(self, rest: str) -> None:
        if rest and self._pieces:
            text, logprobs = self._pieces[0]
            self._pieces[0] = (rest + text, logprobs)
        else:
            self._rest = rest

    def _say_all(self) -> bool:
        tail = self._decoder.flush() if self._decoder is not None else ""
        if tail and not self._say(tail):
            return False
        return self._release(sum([len(text) for text, _ in self._pieces])) and self._say_rest()

    def _say_rest(self) -> bool:
        rest, self._rest = self._rest, ""
        return self._reply.text(self._choice, rest) if rest else True

    def _end(self, end: Finish, stop: str | int | None) -> None:
        self._reply.finish(self._choice, TextFinish(end.reason, self._so_far(), stop))

    def _in_text(self, logprobs: TokenLogprobs) -> TokenText:
        read = self._vocabulary.raw
        raw = read(logprobs.token)
        top = [(read(token), logprob) for token, logprob in logprobs.top]
        return TokenText(
            _readable(raw),
            raw,
            logprobs.logprob,
            tuple((_readable(other), other, logprob) for other, logprob in top),
            self._chars,
        )


def _readable(raw: bytes) -> str:
    return raw.decode(errors="replace")
