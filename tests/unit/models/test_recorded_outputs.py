"""Recorded outputs of nine families through tokenizer, detokeniser and reader, in all groupings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.support.recorded_outputs import (
    BY_TOKEN,
    GROUPINGS,
    WHOLE,
    FamilyModel,
    RecordedOutput,
    judge,
    leaks,
    mutate,
    read_collection,
)
from tests.support.sentencepiece import write_tokenizer

COLLECTION = {
    family.slug: (family, outputs)
    for family, outputs in read_collection(Path(__file__).parents[2] / "data" / "toolcalls")
}
MUTATIONS = 40
"""Mutated outputs of each family. `make fuzz` reads more."""


@pytest.fixture
def family_model(tmp_path: Path, tiny_model: Path) -> Callable[[str], FamilyModel]:
    """Return a function that makes the model of a family."""
    return lambda slug: FamilyModel(
        COLLECTION[slug][0], tmp_path / slug, tiny_model / "tokenizer.json"
    )


@pytest.mark.parametrize("slug", COLLECTION)
async def test_outputs_are_read_to_the_letter_in_all_groupings(slug, family_model):
    model, outputs = family_model(slug), COLLECTION[slug][1]
    verdicts = {
        (output.id, grouping): judge(output, await model.parse(output, grouping))
        for output in outputs
        for grouping in GROUPINGS
    }
    assert {key: verdict for key, verdict in verdicts.items() if verdict != "exact"} == {}


@pytest.mark.parametrize("slug", COLLECTION)
async def test_outputs_are_read_to_the_letter_with_spaces_as_signs(slug, tmp_path):
    """Gemma's and Mistral's tokenizers write spaces as ▁, and their decoders look at neighbours."""
    for kind in ("gemma", "mistral"):
        tokenizer = write_tokenizer(tmp_path / f"{kind}.json", kind)
        model = FamilyModel(COLLECTION[slug][0], tmp_path / kind, tokenizer)
        for output in COLLECTION[slug][1]:
            for grouping in (WHOLE, BY_TOKEN, "rand:1:8"):
                assert judge(output, await model.parse(output, grouping)) == "exact", output


@pytest.mark.parametrize(
    ("slug", "opening", "closing", "mention"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            "I end it by <|call|>, and never write <|channel|>final or <|end|>.",
        ),
        ("qwen3-hermes", "<think>", "</think>", "First <tool_call>, then </think>, they say."),
        ("deepseek", "<think>", "</think>", "Not </think>, but <｜tool▁calls▁begin｜>."),
        ("mistral", "[THINK]", "[/THINK]", "Is [TOOL_CALLS] before [/THINK]?"),
    ],
)
async def test_markers_that_reasoning_spells_out_are_text(
    slug, opening, closing, mention, family_model
):
    model = family_model(slug)
    expected = {"content": "Done.", "reasoning_content": mention, "tool_calls": []}
    output = RecordedOutput(
        "mention", slug, f"{opening}{mention}{closing}Done.", [], [], expected=expected
    )
    for grouping in GROUPINGS:
        assert judge(output, await model.parse(output, grouping)) == "exact"


@pytest.mark.parametrize("slug", COLLECTION)
async def test_mutated_outputs_leak_no_marker_and_stream_like_whole_answers(slug, family_model):
    model, (family, outputs) = family_model(slug), COLLECTION[slug]
    random = Random(slug)
    for _ in range(MUTATIONS):
        output = mutate(random, random.choice(outputs), family.markers)
        whole = await model.parse(output, WHOLE)
        streamed = await model.parse(output, random.choice(GROUPINGS[1:]))
        assert streamed == whole, output
        assert leaks(whole, family.markers) == [], output


@pytest.mark.parametrize("slug", COLLECTION)
async def test_without_callable_tools_calls_are_text(slug, family_model):
    model, (family, outputs) = family_model(slug), COLLECTION[slug]
    for output in outputs:
        answer = await model.parse(output, WHOLE, callable_tools=())
        assert answer.calls == answer.unfinished == []
        assert leaks(answer, family.markers) == []


async def test_one_call_at_most_where_calls_are_not_parallel(family_model):
    model, several = family_model("mistral"), 0
    for output in COLLECTION["mistral"][1]:
        every = await model.parse(output, WHOLE)
        first = await model.parse(output, WHOLE, parallel_tool_calls=False)
        assert first.calls == every.calls[:1]
        several += len(every.calls) > 1
    assert several
