"""An engine that answers with recorded output, to test how answers are read and passed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import FinishReason, GenerateRequest
from dynamo.inference.echo import EchoEngine
from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

MAX_TOKENS_PER_STEP = 64


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a script: the answer to prompts that contain `when`, as text or as token ids.

    `cut`: the answer ends by `length` after so many tokens.
    """

    when: str
    text: str = ""
    ids: tuple[int, ...] = ()
    cut: int | None = None


class ScriptAnswer(msgspec.Struct, frozen=True):
    """A line of a script in tokens."""

    when: str
    ids: Sequence[int]
    reason: FinishReason


class ScriptEngine(EchoEngine):
    """Sends the answer of the first script line that fits the prompt, and else the prompt.

    `tokens_per_step` is the largest number of tokens in a step. The request's sampling seed
    determines the sizes. Stop token ids are not applied.
    """

    name = "script"

    def __init__(
        self,
        answers: Sequence[ScriptAnswer],
        tokenizer: Tokenizer,
        *,
        tokens_per_step: int = 1,
        context_tokens: int,
        vocab_size: int = 0,
    ) -> None:
        super().__init__(context_tokens=context_tokens, vocab_size=vocab_size)
        self._answers = answers
        self._decode = tokenizer.decode
        self._tokens_per_step = tokens_per_step

    def choose_answer(self, prompt: Sequence[int]) -> tuple[Sequence[int], FinishReason]:
        text = self._decode(prompt)
        for answer in self._answers:
            if answer.when in text:
                return answer.ids, answer.reason
        return super().choose_answer(prompt)

    def steps(self, answer: Sequence[int], request: GenerateRequest) -> Iterator[Sequence[int]]:
        random, most = Random(request.sampling.seed), self._tokens_per_step
        start = 0
        while start < len(answer):
            size = random.randint(1, most)
            yield answer[start : start + size]
            start += size


def read_script(path: Path, tokenizer: Tokenizer) -> list[ScriptAnswer]:
    """Read a file of JSON lines (`ScriptLine`). Blocks. Raises `ConfigError` with the line."""
    if not path.name:
        raise ConfigError("out=script needs a script", hint="name its file: --script FILE")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be read: {error.strerror}") from None
    answers = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=ScriptLine)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}, line {number}: {error}",
                hint='a line is {"when": "text in the prompt", "text": "answer"}',
            ) from None
        ids = entry.ids or tuple(unpack_ids(tokenizer.encode_behind_text(entry.text)))
        cut = entry.cut is not None
        answers.append(ScriptAnswer(entry.when, ids[: entry.cut], "length" if cut else "stop"))
    return answers


def parse_tokens_per_step(text: str) -> int:
    """Return the largest number of tokens in a step: `1`, or 8 for `1-8`. Raises `ConfigError`."""
    largest = text.removeprefix("1-")
    number = int(largest) if largest.isdigit() and text == f"1-{largest}" else int(text == "1")
    if 1 <= number <= MAX_TOKENS_PER_STEP:
        return number
    raise ConfigError(
        f"engine.tokens_per_step {text!r} is no range of tokens",
        hint=f"1, or 1-N with N up to {MAX_TOKENS_PER_STEP}",
    )


async def open_engine(inputs: EngineInputs) -> ScriptEngine:
    """Create the engine from the settings' script. Raises `ConfigError`."""
    settings: EngineSettings = inputs.settings.engine
    card, offload = inputs.card, inputs.clock.offload
    tokens_per_step = parse_tokens_per_step(settings.tokens_per_step)
    tokenizer = await offload(load_tokenizer, card.tokenizer_file)
    answers = await offload(partial(read_script, Path(settings.script), tokenizer))
    return ScriptEngine(
        answers,
        tokenizer,
        tokens_per_step=tokens_per_step,
        context_tokens=card.context_tokens,
        vocab_size=card.vocab_size,
    )
