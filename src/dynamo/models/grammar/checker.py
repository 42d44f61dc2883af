"""GrammarChecker: refuses forms of answers that cannot be enforced, before any work is done."""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import weakref
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.errors import (
    DECODE_ERRORS,
    DynamoError,
    InvalidRequest,
    Overloaded,
    SchemaTooComplex,
)
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.refusal import grammar_refusal, schema_refusal
from dynamo.models.grammar.trial_process import Verdict, read_message, write_message

if TYPE_CHECKING:
    from concurrent.futures import Executor

MAX_VERDICTS = 1024
"""So many forms are remembered, as accepted or with their errors."""
MAX_WAITING = 64
"""So many new forms may wait for their check, of which each takes `TRIAL_CPU_S` at most."""
TRIAL_TIMEOUT_S = 30.0
"""A trial without a result after this time has failed for want of CPU time."""


class GrammarChecker:
    """Tries each new form in a process of its own (`trial_process`), which the first form starts.

    One trial runs at a time, in a thread. The process ends with the checker.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._thread: Executor | None = None
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, structured: StructuredOutput, field: str = "response_format") -> None:
        """Return if the form can be enforced. Raises `InvalidRequest` and `SchemaTooComplex`, which
        name `field`, and `Overloaded` where no trial is possible now."""
        encoded = msgspec.msgpack.encode(structured)
        key = blake2b(encoded, digest_size=16).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            if self._thread is None:
                from concurrent.futures import ThreadPoolExecutor

                self._thread = ThreadPoolExecutor(1, "forms of answers")
            if self._waiting >= MAX_WAITING:
                raise Overloaded("too many new forms of answers wait for their check")
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._thread, self._judge, key, encoded)
            finally:
                self._waiting -= 1
        if verdict.error:
            raise _refusal(structured, verdict, field)

    def _judge(self, key: bytes, encoded: bytes) -> Verdict:
        """Return the verdict on a form, in the thread. A caller may be cancelled meanwhile; the
        trial then ends before the next one begins. Raises `Overloaded`."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._try(encoded)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _try(self, encoded: bytes) -> Verdict:
        """Ask the process. Raises `Overloaded`."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start_process()
            weakref.finalize(self, _stop_process, self._process)
        process = self._process
        outgoing, incoming = process.stdin, process.stdout
        try:
            if outgoing and incoming:
                write_message(outgoing, encoded)
                if select.select([incoming], [], [], TRIAL_TIMEOUT_S)[0]:
                    return _decode_verdict(read_message(incoming) or b"")
        except (OSError, *DECODE_ERRORS):
            pass  # the process has died
        _stop_process(process)
        raise Overloaded("the form of the answer could not be checked in time")


_decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def _start_process() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dynamo.models.grammar.trial_process"]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # The log pipe of this process is not inherited: its end tells the supervisor of a death.
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, bufsize=0)  # noqa: S603


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _refusal(structured: StructuredOutput, verdict: Verdict, field: str) -> DynamoError:
    """Return the error of a form that cannot be enforced."""
    if verdict.too_complex:
        kind = "grammar of their calls" if structured.kind == "calls" else structured.kind
        return SchemaTooComplex(
            f"{field}: the {kind} is too complex: {verdict.error.partition(chr(10))[0]}",
            hint="use fewer properties, shorter repetitions or a simpler pattern",
            param=field,
        )
    if structured.kind == "json_schema":
        return schema_refusal(structured.value, verdict.error, field)
    if structured.kind in ("grammar", "regex"):
        return grammar_refusal(structured.kind, verdict.error, field)
    text = verdict.error.partition("\n")[0]
    return InvalidRequest(f"{field}: the form cannot be enforced: {text}", param=field)
