"""Recorded outputs of models: how they are read in process, judged and mutated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Reply, SendRequest
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ChatRequest,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import EngineInfo, Finish, GenerateRequest, Started
from dynamo.models.card import ModelCard
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.file_cache import file_ref
from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer
from dynamo.scheduling.processor import ChatProcessor
from dynamo.testing.family import TEMPLATE, write_family_folder

WHOLE, BY_TOKEN, BY_SPECIAL = "one", "token", "special"
GROUPINGS = (WHOLE, BY_SPECIAL, BY_TOKEN, *(f"rand:{seed}:8" for seed in range(1, 6)))


class FamilyFile(msgspec.Struct, frozen=True):
    """The description of a family in a collection of outputs."""

    slug: str
    markers: list[str]
    reference_models: list[dict[str, Any]] = []


class RecordedOutput(msgspec.Struct, frozen=True):
    """An output, the tools that were offered, and how it must be read."""

    id: str
    family: str
    raw_output: str
    tools: list[dict[str, Any]]
    tags: list[str]
    models: list[str] = []
    expected: dict[str, Any] | None = None
    expected_error: dict[str, Any] | None = None
    generation_prompt: str | None = None

    @property
    def truncated(self) -> bool:
        """Whether the output ended because it was too long."""
        return "truncated" in self.tags


class ParsedAnswer(msgspec.Struct, frozen=True):
    """An answer as a client gets it. `unfinished`: calls that were not completed."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, str]]
    unfinished: list[tuple[str, str]] = []
    reason: str = "stop"


def read_collection(folder: Path) -> Iterator[tuple[FamilyFile, list[RecordedOutput]]]:
    """Return every family of a folder with its outputs."""
    for path in sorted(folder.glob("*/family.json")):
        family = msgspec.json.decode(path.read_bytes(), type=FamilyFile)
        prompts = {
            model["repo"]: model.get("default_generation_prompt")
            for model in family.reference_models
        }
        outputs = []
        for line in (path.parent / "outputs.jsonl").read_bytes().splitlines():
            output = msgspec.json.decode(line, type=RecordedOutput)
            if output.generation_prompt is None and output.models:
                prompt = prompts.get(output.models[0])
                output = msgspec.structs.replace(output, generation_prompt=prompt)
            outputs.append(output)
        yield family, outputs


def judge(output: RecordedOutput, answer: ParsedAnswer) -> str:
    """Return "exact", "soft" (right but for white space at the ends of texts) or "wrong"."""
    try:
        calls = [(name, _strict_json(arguments)) for name, arguments in answer.calls]
    except ValueError:
        return "wrong"
    if output.expected is None:
        return "wrong" if calls else "exact"
    expected = output.expected
    wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    if not (len(calls) == len(wanted) and all(map(_same_json, calls, wanted))):
        return "wrong"
    texts = (answer.content or None, answer.reasoning or None)
    wanted_texts = (expected["content"] or None, expected["reasoning_content"] or None)
    if texts == wanted_texts:
        return "exact"
    stripped = tuple((text or "").strip() for text in texts)
    return "soft" if stripped == tuple((text or "").strip() for text in wanted_texts) else "wrong"


def _same_json(first: Any, second: Any) -> bool:
    """Compare JSON values, in which true is not 1 and 1 is 1.0."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same_json, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same_json(value, second[key]) for key, value in first.items()
        )
    return bool(first == second)


def _strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    value: dict[str, Any] = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    return value


class RecordedReply(TextReply):
    """Collects a parsed answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, list[str]] = {}
        self.complete: set[int] = set()
        self.end: TextFinish | None = None

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None: ...

    def begin(self, choice: int, started: Started) -> None: ...

    def text(self, choice: int, delta: str, logprobs: Any = None) -> bool:
        self.texts.append(delta)
        return True

    def event(self, choice: int, event: AnswerEvent) -> bool:
        if isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, CallBegun):
            assert event.index == len(self.calls)
            self.calls[event.index] = [event.name]
        elif isinstance(event, ArgumentsDelta):
            self.calls[event.index].append(event.text)
        elif isinstance(event, CallEnded):
            self.complete.add(event.index)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        self.end = end

    def answer(self) -> ParsedAnswer:
        """Return what was collected."""
        assert self.end is not None
        calls = {number: (name, "".join(parts)) for number, (name, *parts) in self.calls.items()}
        return ParsedAnswer(
            "".join(self.texts) or None,
            "".join(self.reasoning) or None,
            [call for number, call in calls.items() if number in self.complete],
            [call for number, call in calls.items() if number not in self.complete],
            self.end.reason,
        )


class FamilyModel:
    """A model folder of a family, whose answers are given. `engine`: that of its workers."""

    def __init__(
        self,
        family: FamilyFile,
        folder: Path,
        tokenizer_file: Path | None,
        engine: EngineInfo | None = None,
    ) -> None:
        self._markers = family.markers
        write_family_folder(family.markers, folder, tokenizer_file)
        self.tokenizer: Tokenizer = load_tokenizer(folder / "tokenizer.json")
        card = ModelCard(
            names=(family.slug,),
            context_tokens=1 << 16,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=file_ref(folder / "tokenizer.json"),
            tool_format=family.slug,
            engine=engine,
        )
        self._engine: SendRequest = self._send
        self._answer: tuple[list[tuple[int, ...]], str] = ([], "stop")
        self._processor = ChatProcessor(
            card,
            self.tokenizer,
            ChatTemplate(TEMPLATE),
            self._forward,
            SamplingSettings(),
            SystemClock(),
            Random(1),
        )

    async def _forward(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        await self._engine(request, context, reply)

    async def _send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        steps, reason = self._answer
        reply.begin(Started())
        for ids in steps:
            if not reply.tokens(ids):
                return
        reply.finish(Finish("length" if reason == "length" else "stop", sum(map(len, steps))))

    def steps(self, output: RecordedOutput, grouping: str) -> list[tuple[int, ...]]:
        """Return the steps of an output. Markers that its reasoning mentions are plain text there,
        as in the ids that models wrote."""
        reasoning = (output.expected or {}).get("reasoning_content") or ""
        if not any(marker in reasoning for marker in self._markers):
            return self.groups(output.raw_output, grouping)
        encode = self.tokenizer.encode_behind_text
        before, mention, after = output.raw_output.partition(reasoning)
        ids = encode(before) + encode(mention, parse_special=False) + encode(after)
        return self._split(unpack_ids(ids), grouping)

    def groups(self, text: str, grouping: str) -> list[tuple[int, ...]]:
        """Return the token ids of a text in the steps of a grouping."""
        return self._split(unpack_ids(self.tokenizer.encode_behind_text(text)), grouping)

    def _split(self, ids: tuple[int, ...], grouping: str) -> list[tuple[int, ...]]:
        if grouping == WHOLE:
            return [ids]
        if grouping == BY_TOKEN:
            return [(token,) for token in ids]
        steps, position = list[tuple[int, ...]](), 0
        if grouping == BY_SPECIAL:
            for number, token in enumerate(ids):
                if token in self.tokenizer.special_ids:
                    steps += [ids[position:number], (token,)]
                    position = number + 1
            return [step for step in (*steps, ids[position:]) if step]
        _, seed, most = grouping.split(":")
        random = Random(int(seed))
        while position < len(ids):
            size = random.randint(1, int(most))
            steps.append(ids[position : position + size])
            position += size
        return steps

    async def parse(
        self,
        output: RecordedOutput,
        grouping: str,
        *,
        send: SendRequest | None = None,
        reply: RecordedReply | None = None,
        **options: Any,
    ) -> ParsedAnswer:
        """Return the answer that a client gets for an output. `send` replaces the engine."""
        reason = "length" if output.truncated else "stop"
        self._answer = (self.steps(output, grouping), reason)
        self._engine = send or self._send
        request = ChatRequest(
            model=output.family,
            messages=({"role": "user", "content": output.id},),
            tools=tuple(output.tools),
            template_args={"generation_prompt": output.generation_prompt or ""},
            **options,
        )
        reply = reply or RecordedReply()
        await self._processor.chat(request, Context("r"), reply)
        return reply.answer()


def mutate(random: Random, output: RecordedOutput, markers: Sequence[str]) -> RecordedOutput:
    """Return an output that is cut, doubled, joined with itself, or has markers where none were."""
    text = output.raw_output
    tags = [tag for tag in output.tags if tag != "truncated"]
    for _ in range(random.randint(1, 3)):
        first, second = sorted(random.randrange(len(text) + 1) for _ in range(2))
        kind = random.randrange(6)
        if kind == 0:
            text = text[:first]
        elif kind == 1:
            text = text[:second] + text[first:]
        elif kind == 2:
            text = text[:first] + text[second:]
        elif kind == 3:
            text = text[:first] + random.choice(markers) + text[first:]
        elif kind == 4:
            marker = random.choice(markers)
            cut = random.randrange(1, len(marker) + 1)
            text = text[:first] + marker[:cut] + text[first:]
        else:
            old, new = random.choice(markers), random.choice(markers)
            text = text.replace(old, new, 1)
    if random.random() < 0.5:
        tags.append("truncated")
    return msgspec.structs.replace(
        output, raw_output=text, tags=tags, expected=None, expected_error={}
    )


def leaks(answer: ParsedAnswer, markers: Sequence[str]) -> list[str]:
    """Return the markers that stand outside of argument values."""
    texts = [answer.content or "", answer.reasoning or ""]
    for name, arguments in answer.calls:
        texts += [name, *_keys(json.loads(arguments))]
    texts += [name for name, _ in answer.unfinished]
    return [marker for marker in markers if any(marker in text for text in texts)]


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)
