"""GrammarChecker: refuses structured outputs that cannot be enforced, before any work is done."""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import partial
from hashlib import blake2b

import msgspec

from dynamo.core.errors import DynamoError, InvalidRequest, SchemaTooComplex
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.refusal import grammar_refusal, schema_refusal
from dynamo.models.grammar.trial_lane import TrialLane
from dynamo.models.grammar.trial_process import Verdict

MAX_VERDICTS = 1024
"""So many structured outputs are remembered, as accepted or with their errors."""
SMALL_FORM_SIZE = 8 << 10
"""Trials of structured outputs up to this size take 20 ms of CPU time at most, if they are not
hostile."""
SMALL_TRIAL_CPU_S, TRIAL_CPU_S = 0.05, 0.2
"""A small structured output that takes longer is tried again as a large one."""
REPETITION_SIZE = 16
"""Each repetition in a pattern counts as so many bytes."""
SMALL_NICENESS, LARGE_NICENESS = 5, 10
"""Beside a process that uses its core, a trial gets 25 % of it, or 10 %."""
_REPETITION = re.compile(r"\{(?:\d*,)?(\d{1,6})\d*\}")


class GrammarChecker:
    """Tries each new structured output in a process apart (`trial_process`). Small outputs do not
    wait for large ones, and callers take turns."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._small = TrialLane(SMALL_NICENESS, SMALL_TRIAL_CPU_S)
        self._large = TrialLane(LARGE_NICENESS, TRIAL_CPU_S)

    async def check(
        self, structured: StructuredOutput, field: str = "response_format", caller: str = ""
    ) -> None:
        """Return if the structured output can be enforced. Raises `InvalidRequest` and
        `SchemaTooComplex`, which name `field`, and `Overloaded` where no trial is possible now."""
        encoded = msgspec.msgpack.encode(structured)
        key = blake2b(encoded, digest_size=16).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            if form_size(structured.value) <= SMALL_FORM_SIZE:
                verdict = await self._try(self._small, caller, key, encoded)
            if verdict is None or verdict.timed_out:
                verdict = await self._try(self._large, caller, key, encoded)
        if verdict.error:
            raise _refusal(structured, verdict, field)

    async def _try(self, lane: TrialLane, caller: str, key: bytes, encoded: bytes) -> Verdict:
        return await lane.run(caller, partial(self._judge, lane, key, encoded))

    def _judge(self, lane: TrialLane, key: bytes, encoded: bytes) -> Verdict:
        """Return the verdict on a structured output, in the lane's thread. A caller may be
        cancelled meanwhile; the trial then ends before the next one begins. Raises `Overloaded`."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = lane.try_output(encoded)
            if verdict.timed_out and lane is self._small:
                return verdict
            self._verdicts[key] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict


def form_size(text: str) -> int:
    """Return the bytes of a structured output, and of the repetitions in its patterns as if written
    out."""
    return len(text) + REPETITION_SIZE * sum(map(int, _REPETITION.findall(text)))


def _refusal(structured: StructuredOutput, verdict: Verdict, field: str) -> DynamoError:
    """Return the error of a structured output that cannot be enforced."""
    if verdict.too_complex:
        kind = "grammar of their calls" if structured.kind == "calls" else structured.kind
        return SchemaTooComplex(
            f"the {kind} is too complex: {verdict.error.partition(chr(10))[0]}",
            hint="use fewer properties, shorter repetitions or a simpler pattern",
            field=field,
        )
    if structured.kind == "json_schema":
        return schema_refusal(structured.value, verdict.error, field)
    if structured.kind in ("grammar", "regex"):
        return grammar_refusal(structured.kind, verdict.error, field)
    text = verdict.error.partition("\n")[0]
    return InvalidRequest(f"the structured output cannot be enforced: {text}", field=field)
