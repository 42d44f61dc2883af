"""The process that tries structured outputs before a worker sees them.

Some grammars take seconds for their first mask. Trials run in a fork of this process, which the
kernel ends when an output takes more than `cpu_s` of CPU time. A busy machine therefore refuses no
more than an idle one. The process reads outputs from stdin and ends with it, and with its parent.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from socket import socketpair
from struct import Struct
from typing import IO, TYPE_CHECKING, Any, NoReturn

import msgspec

from dynamo.core.errors import InvalidRequest
from dynamo.core.host.parent_death_signal import set_parent_death_signal
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.grammar_text import grammar_text, parser_limits
from dynamo.models.grammar.refusal import find_endless

if TYPE_CHECKING:
    from io import BufferedRWPair

    from llguidance import LLTokenizer

    Stream = IO[bytes] | BufferedRWPair[Any, Any]

MAX_STEPS = 256
"""So many bytes of an answer are tried, since patterns are only read where they begin."""
AUTOGROUP_TRIES = 20
MAX_ERROR_CHARS = 2000
_EOS = 256
_PREFERRED = b'"}]0a'
_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)*/|<\[(\d+)\]>')
"""A text, a regular expression, or a token by its id in a grammar of calls."""
_length = Struct("<I")


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a trial. `error`: why the structured output cannot be enforced. `too_complex`:
    it can, but takes too long. `timed_out`: the trial took too long."""

    error: str = ""
    too_complex: bool = False
    timed_out: bool = False


class ByteTokenizer:
    """A tokenizer of single bytes, with the attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    eos_token_id = _EOS
    bos_token_id = None
    special_token_ids = (_EOS,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _byte_tables() -> LLTokenizer:
    """Return tables of a vocabulary of single bytes, made in milliseconds."""
    from llguidance import LLTokenizer

    tokenizer: Any = ByteTokenizer()
    return LLTokenizer(tokenizer)


def _byte_token(match: re.Match[str]) -> str:
    """Return a control character's token for a token of the model's vocabulary."""
    return f"<[{int(match[1]) % 32}]>" if match[1] else match[0]


def try_output(structured: StructuredOutput) -> Verdict:
    """Compile a structured output and follow the beginning of one answer."""
    from llguidance import LLMatcher

    tables = _byte_tables()
    if structured.kind == "json_schema":
        endless = find_endless(msgspec.json.decode(structured.value))
        if endless:
            return Verdict(f"the recursion at {endless} never ends")
    try:
        text = grammar_text(structured)
    except InvalidRequest as error:
        return Verdict(error.message)
    if structured.kind == "calls":
        text = _TOKENS.sub(_byte_token, text)
    matcher = LLMatcher(tables, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return Verdict(matcher.get_error())
    for _ in range(MAX_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return Verdict(matcher.get_error(), too_complex=True)
        if matcher.is_stopped() and not matcher.is_accepting():
            return Verdict("no answer satisfies it")
        if matcher.is_accepting():
            break
        preferred = next((byte for byte in _PREFERRED if mask[byte >> 3] >> (byte & 7) & 1), None)
        if preferred is None:
            allowed = int.from_bytes(mask[: _EOS // 8], "little")
            if not allowed:
                return Verdict("no answer satisfies it")
            preferred = (allowed & -allowed).bit_length() - 1
        matcher.consume_token(preferred)
    return Verdict()


def _shorten(verdict: Verdict) -> Verdict:
    """Leave out the middle of a long error, which may repeat all of the structured output."""
    error = verdict.error
    if len(error) <= MAX_ERROR_CHARS:
        return verdict
    half = MAX_ERROR_CHARS // 2
    return Verdict(f"{error[:half]} ... {error[-half:]}", verdict.too_complex)


def write_message(stream: Stream, payload: bytes) -> None:
    """Write one message with its length before it."""
    stream.write(_length.pack(len(payload)) + payload)
    stream.flush()


def read_message(stream: Stream) -> bytes | None:
    """Read one message; None at the end of the stream."""
    head = _read_exactly(stream, _length.size)
    return None if head is None else _read_exactly(stream, _length.unpack(head)[0])


def _read_exactly(stream: Stream, size: int) -> bytes | None:
    """Read `size` bytes, of which a pipe gives a part at a time; None at the end of the stream."""
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
    return data


def _try_safely(payload: bytes) -> Verdict:
    """Return the verdict on an encoded structured output, whatever the output does to its trial."""
    try:
        return _shorten(try_output(msgspec.msgpack.decode(payload, type=StructuredOutput)))
    except RecursionError:
        return Verdict("it is nested too deeply", too_complex=True)
    except Exception as error:  # noqa: BLE001 - the structured output's, whatever it is
        return Verdict(f"its trial failed: {error!r}"[:MAX_ERROR_CHARS])


def _serve(stream: Stream, cpu_s: float) -> NoReturn:
    """Try each structured output that arrives. The kernel ends this process when one takes too
    long."""
    try:
        while (payload := read_message(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            verdict = _try_safely(payload)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_message(stream, msgspec.msgpack.encode(verdict))
    finally:
        os._exit(0)


class Trials:
    """A fork of this process that tries structured outputs; another one after the kernel has ended
    it. A trial has `cpu_s` of CPU time."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._fork()

    def _fork(self) -> None:
        ours, theirs = socketpair()
        self._pid = os.fork()
        if not self._pid:
            set_parent_death_signal()
            ours.close()
            _serve(theirs.makefile("rwb"), self._cpu_s)
        self._stream = ours.makefile("rwb")

    def judge(self, payload: bytes) -> bytes:
        """Return the encoded verdict on an encoded structured output."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:  # something has killed it meanwhile
            self._fork()
        verdict = None
        with suppress(OSError):
            write_message(self._stream, payload)
            verdict = read_message(self._stream)
        if verdict is None:
            os.waitpid(self._pid, 0)
            self._fork()
            text = f"a trial took more than {self._cpu_s * 1e3:.0f} ms"
            verdict = msgspec.msgpack.encode(Verdict(text, too_complex=True, timed_out=True))
        return verdict


def lower_priority(niceness: int) -> None:
    """Give this process less CPU time than others. Linux divides CPU time among sessions first
    (autogroups), so that the niceness of a process counts within its session only. The kernel lets
    users but root change one autogroup in a tenth of a second."""
    os.nice(niceness)
    os.setsid()
    for _ in range(AUTOGROUP_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a kernel without autogroups
            return
        else:
            return


def main(niceness: int, cpu_s: float) -> int:
    """Try each structured output that arrives."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend ends first, and stdin with it
    try_output(StructuredOutput("json_object"))  # loads the library before the first fork
    lower_priority(niceness)
    trials = Trials(cpu_s)
    while (payload := read_message(sys.stdin.buffer)) is not None:
        write_message(sys.stdout.buffer, trials.judge(payload))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
