"""The readers of answers under mutated outputs of nine families."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from tests.fuzz.campaign import Target
from tests.fuzz.mutations import Mutator
from tests.support.recorded_outputs import (
    GROUPINGS,
    WHOLE,
    FamilyModel,
    RecordedOutput,
    leaks,
    mutate,
    read_collection,
)

COLLECTION = Path(__file__).parents[1] / "data" / "toolcalls"


class AnswersTarget(Target):
    """Reads outputs that are cut, doubled or have markers where none were.

    No marker may stand outside of an argument value, and a stream must equal the whole answer.
    """

    seeds: Sequence[bytes] = ()
    words: Sequence[bytes] = ()

    def __init__(self, tokenizer_file: Path | None = None, collection: Path = COLLECTION) -> None:
        self._tokenizer_file = tokenizer_file
        self._families = list(read_collection(collection))
        self._models: dict[str, FamilyModel] = {}

    async def open(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for family, _ in self._families:
                path = Path(folder) / family.slug
                self._models[family.slug] = FamilyModel(family, path, self._tokenizer_file)

    async def close(self) -> None:
        self._models.clear()

    def next(self, mutator: Mutator) -> bytes:
        random: Random = mutator.random
        family, outputs = random.choice(self._families)
        output = mutate(random, random.choice(outputs), family.markers)
        return msgspec.json.encode((output, random.choice(GROUPINGS[1:])))

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        output, grouping = msgspec.json.decode(data, type=tuple[RecordedOutput, str])
        model = self._models[output.family]
        markers = next(
            family.markers for family, _ in self._families if family.slug == output.family
        )
        whole, streamed = await model.parse(output, WHOLE), await model.parse(output, grouping)
        assert streamed == whole, (grouping, streamed, whole)
        assert leaks(whole, markers) == []

    async def check(self) -> None:
        family, outputs = self._families[0]
        await self._models[family.slug].parse(outputs[0], WHOLE)

    def open_count(self) -> int:
        return 0
