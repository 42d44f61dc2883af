"""GrammarChecker: refuses forms of answers that cannot be enforced, before any work is done."""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import weakref
from collections import OrderedDict

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InvalidRequest, Overloaded, SchemaTooComplex
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.refusal import find_endless, grammar_refusal, schema_refusal
from dynamo.models.grammar.trial_process import Verdict, read_message, write_message

MAX_VERDICTS = 1024
"""So many forms are remembered, as accepted or with their errors."""
TRIAL_TIMEOUT_S = 30.0
"""A trial without a result after this time has failed for want of CPU time."""


class GrammarChecker:
    """Tries each new form in a process of its own (`trial_process`), which the first form starts.

    One trial runs at a time. The process ends with the checker.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._verdicts: OrderedDict[StructuredOutput, Verdict] = OrderedDict()
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, structured: StructuredOutput, field: str = "response_format") -> None:
        """Return if the form can be enforced. Raises `InvalidRequest` and `SchemaTooComplex`, which
        name `field`, and `Overloaded` where no trial is possible now."""
        verdict = self._verdicts.get(structured)
        if verdict is None:
            async with self._turn:
                verdict = self._verdicts.get(structured)
                if verdict is None:
                    verdict = await self._judge(structured)
            self._verdicts[structured] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.error:
            raise _refusal(structured, verdict, field)

    async def _judge(self, structured: StructuredOutput) -> Verdict:
        if structured.kind == "json_schema":
            try:
                endless = find_endless(msgspec.json.decode(structured.value))
            except RecursionError:
                return Verdict("the schema is nested too deeply", too_complex=True)
            if endless:
                return Verdict(f"the recursion at {endless} never ends")
        return await self._clock.offload(self._try, structured)

    def _try(self, structured: StructuredOutput) -> Verdict:
        """Ask the process. Blocks. Raises `Overloaded`."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start_process()
            weakref.finalize(self, _stop_process, self._process)
        process = self._process
        outgoing, incoming = process.stdin, process.stdout
        verdict = None
        try:
            if outgoing and incoming:
                write_message(outgoing, msgspec.msgpack.encode(structured))
                if select.select([incoming], [], [], TRIAL_TIMEOUT_S)[0]:
                    verdict = read_message(incoming)
        except OSError:
            pass  # the process has died
        if verdict is None:
            _stop_process(process)
            raise Overloaded("the form of the answer could not be checked in time")
        return msgspec.msgpack.decode(verdict, type=Verdict)


def _start_process() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dynamo.models.grammar.trial_process"]
    return subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _refusal(structured: StructuredOutput, verdict: Verdict, field: str) -> DynamoError:
    """Return the error of a form that cannot be enforced."""
    if verdict.too_complex:
        return SchemaTooComplex(
            f"{field}: the {structured.kind} is too complex: {verdict.error.partition(chr(10))[0]}",
            hint="use fewer properties, shorter repetitions or a simpler pattern",
            param=field,
        )
    if structured.kind == "json_schema":
        return schema_refusal(structured.value, verdict.error, field)
    if structured.kind in ("grammar", "regex"):
        return grammar_refusal(structured.kind, verdict.error, field)
    text = verdict.error.partition("\n")[0]
    return InvalidRequest(f"{field}: the form cannot be enforced: {text}", param=field)
