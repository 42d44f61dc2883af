"""Grammars of answers: what may come next, what is refused, and how reasoning passes by."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, SchemaTooComplex
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar import trial_lane
from dynamo.models.grammar.checker import SMALL_NICENESS, GrammarChecker
from dynamo.models.grammar.grammar_text import grammar_text
from dynamo.models.grammar.matcher import MAX_COMPILED, GrammarCompiler, GrammarMatcher
from dynamo.models.grammar.refusal import find_endless

EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(document: Any, **fields: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(document), **fields)


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model / "tokenizer.json", [EOS])


@pytest.fixture
async def checker(monkeypatch: pytest.MonkeyPatch) -> GrammarChecker:
    """A checker whose trials have time on a busy machine, too."""
    monkeypatch.setattr(trial_lane, "TRIAL_TIMEOUT_S", 60.0)
    return GrammarChecker()


def allowed(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [token for token in range(len(mask) * 8) if mask[token >> 3] >> (token & 7) & 1]


def random_answer(matcher: GrammarMatcher, tokenizer: Any, seed: int) -> str:
    chance, tokens = Random(seed), list[int]()
    while not matcher.finished and len(tokens) < 500:
        tokens.append(chance.choice(allowed(matcher.mask())))
        assert matcher.feed(tokens, 0), matcher.error
    return str(tokenizer.decode([token for token in tokens if token != EOS]))


@pytest.mark.parametrize("length", [1, 8, 11, 20])
def test_groups_of_tokens_change_no_mask(
    compiler: GrammarCompiler, tiny_model: Path, length: int
) -> None:
    """White space, strings with a `maxLength` and with a pattern."""
    texts = {"type": "string", "maxLength": length}, {"type": "string", "pattern": "^[a-z]{2,9}"}
    pattern = r"[\x20\x0A\x0D\x09]+"
    form = schema({"type": "array", "items": {"anyOf": texts}}, whitespace_pattern=pattern)
    tables = LLTokenizer(str(tiny_model / "tokenizer.json"), eos_token=[EOS], slices=[])
    plain = LLMatcher(tables, grammar_text(form))
    matcher, chance, tokens = compiler.open_matcher(form), Random(length), list[int]()
    while not matcher.finished and len(tokens) < 100:
        mask = matcher.mask()
        assert mask == plain.compute_bitmask()
        tokens.append(chance.choice(allowed(mask)))
        assert matcher.feed(tokens, 0) == plain.consume_token(tokens[-1])


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_make_a_valid_answer_and_then_it_ends(
    compiler: GrammarCompiler, tokenizer: Any, seed: int
) -> None:
    matcher = compiler.open_matcher(schema(PERSON))
    text = random_answer(matcher, tokenizer, seed)
    person = json.loads(text)
    assert matcher.finished
    assert person["name"] in ("Ann", "Bo")
    assert text == json.dumps(person)  # the separators of json.dumps


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (StructuredOutput("choice", '["yes", "no"]'), {"yes", "no"}),
        (StructuredOutput("regex", "^(on|off)$"), {"on", "off"}),
        (StructuredOutput("grammar", 'root ::= "a" ("b" | "c")'), {"ab", "ac"}),
        (StructuredOutput("grammar", 'start: "a" | "b"'), {"a", "b"}),
    ],
)
def test_other_forms(
    compiler: GrammarCompiler, tokenizer: Any, form: StructuredOutput, texts: set[str]
) -> None:
    answers = {random_answer(compiler.open_matcher(form), tokenizer, seed) for seed in range(20)}
    assert answers == texts


def test_white_space_is_free_on_request(compiler: GrammarCompiler, tokenizer: Any) -> None:
    form = schema({"type": "object", "properties": {}}, whitespace_pattern="[ \n]{1,3}")
    tight = schema({"type": "object", "properties": {}, "additionalProperties": False})
    assert any(
        "\n" in random_answer(compiler.open_matcher(form), tokenizer, seed) for seed in range(9)
    )
    assert random_answer(compiler.open_matcher(tight), tokenizer, 0) == "{}"


def test_choices_do_not_share_their_state(compiler: GrammarCompiler, tokenizer: Any) -> None:
    first, second = (compiler.open_matcher(schema(PERSON)) for _ in range(2))
    random_answer(first, tokenizer, 1)
    assert first.finished
    assert random_answer(second, tokenizer, 1)


def test_tokens_of_an_earlier_attempt_are_fed_first(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    ids = [7, *tokenizer_ids(tokenizer, '{"name": "Ann", "a')]
    matcher = compiler.open_matcher(schema(PERSON))
    assert matcher.feed(ids, 1)
    ids += tokenizer_ids(tokenizer, 'ge": 3}')
    assert matcher.feed(ids, 1)
    assert matcher.finished


def test_a_wrong_token_ends_this_answer_only(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.open_matcher(schema(PERSON))
    assert not matcher.feed(tokenizer_ids(tokenizer, "no"), 0)
    assert matcher.mask() is None
    assert "not allowed" in str(matcher.failure())
    assert compiler.open_matcher(schema(PERSON)).feed(tokenizer_ids(tokenizer, "{"), 0)


def test_a_form_begins_behind_reasoning(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """Token 1 opens reasoning and token 0 closes it."""
    start, end = pack_ids([1]), pack_ids([0])
    inside = compiler.open_matcher(schema(PERSON, reasoning_end=end))
    words = tokenizer_ids(tokenizer, "many thoughts")
    assert inside.feed(words, 0)
    assert EOS not in allowed(inside.mask())
    assert inside.feed([*words, 0], 0)
    assert inside.mask() is not None
    either = compiler.open_matcher(schema(PERSON, reasoning_start=start, reasoning_end=end))
    assert 1 in allowed(either.mask())
    assert either.feed([1, *words, 0, *tokenizer_ids(tokenizer, "{")], 0)
    assert 1 not in allowed(either.mask())


@pytest.mark.parametrize("form", [StructuredOutput("text"), schema(PERSON)], ids=lambda f: f.kind)
def test_the_end_of_reasoning_is_forced_after_its_limit(
    compiler: GrammarCompiler, tokenizer: Any, form: StructuredOutput
) -> None:
    """Token 1 opens reasoning and token 0 closes it; neither counts."""
    start, end = pack_ids([1]), pack_ids([0])
    limited = replace(form, reasoning_start=start, reasoning_end=end, reasoning_limit=3)
    words = tokenizer_ids(tokenizer, "many long thoughts about it")[:3]
    early, late, moved = (compiler.open_matcher(limited) for _ in range(3))
    assert early.feed([1, *words[:2], 0], 0)
    assert late.feed([1, *words[:2]], 0)
    assert late.mask() is None or len(allowed(late.mask())) > 1
    assert late.feed([1, *words], 0)
    assert moved.feed([7, 1, *words], 1)
    assert allowed(late.mask()) == allowed(moved.mask()) == [0]
    assert late.feed([1, *words, 0], 0)
    for matcher in (early, late):
        assert matcher.mask() is None if form.kind == "text" else matcher.mask() is not None
    inside = compiler.open_matcher(replace(form, reasoning_end=end, reasoning_limit=0))
    assert allowed(inside.mask()) == [0]


def test_reasoning_that_begins_again_has_what_is_left_of_its_limit(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    start, end = pack_ids([1]), pack_ids([0])
    form = StructuredOutput("text", "", "", start, end, reasoning_limit=2)
    matcher = compiler.open_matcher(form)
    first, second = tokenizer_ids(tokenizer, "a b")[:2]
    assert matcher.feed([1, first, 0, second, 1], 0)
    assert matcher.mask() is None
    assert matcher.feed([1, first, 0, second, 1, second], 0)
    assert allowed(matcher.mask()) == [0]


def test_an_escaped_anchor_is_a_character(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.open_matcher(StructuredOutput("regex", r"^(a|b)\$"))
    assert random_answer(matcher, tokenizer, 1) in ("a$", "b$")


def test_only_so_many_grammars_are_remembered(compiler: GrammarCompiler) -> None:
    for number in range(MAX_COMPILED + 3):
        compiler.open_matcher(StructuredOutput("regex", f"a{number}"))
    assert len(compiler._compiled) == MAX_COMPILED


REFUSED = {
    "not": (schema({"properties": {"a": {"not": {}}}}), "'not' at /properties/a/not"),
    "pointer": (
        schema({"properties": {"a/b": {"items": {"uniqueItems": True}}}}),
        "/properties/a~1b/items/uniqueItems",
    ),
    "a property named not": (
        schema({"properties": {"not": {"type": "string"}, "b": {"not": {}}}}),
        "/properties/b/not",
    ),
    "format": (schema({"type": "string", "format": "iri"}), "'format' at /format"),
    "type": (schema({"type": "foo"}), "'type' at /type"),
    "reference": (schema({"$ref": "#/$defs/x"}), "'$ref' at /$ref"),
    "remote": (schema({"$ref": "http://a/b"}), "'$ref' at /$ref"),
    "pattern": (schema({"type": "string", "pattern": "(a"}), "'pattern' at /pattern: unclosed"),
    "unsatisfiable": (schema({"minLength": 5, "maxLength": 2, "type": "string"}), "minLength (5)"),
    "itself": (schema({"$ref": "#"}), "/$ref never ends"),
    "endless": (
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        "/properties/a/$ref never ends",
    ),
    "lark": (StructuredOutput("grammar", 'start: "a" foo\n\nfoo: ba(r\n'), "line 3, column 10"),
    "gbnf": (StructuredOutput("grammar", 'root ::= "a"\nfoo ::= [a-z'), "line 2, column 13"),
    "regex": (StructuredOutput("regex", "(a|b"), "unclosed group"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_say_where_the_mistake_is(checker: GrammarChecker, name: str) -> None:
    form, text = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(form)
    assert text in caught.value.message
    assert not isinstance(caught.value, SchemaTooComplex)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput("regex", "(x{1000}){1000}"),
        schema({"type": "string", "pattern": "^(x{1000}){1000}$"}),
        schema(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^(x{1000}){1000}$"}},
                "required": ["a"],
            }
        ),
        schema({"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}),
    ],
)
async def test_hostile_forms_are_too_complex(
    checker: GrammarChecker, form: StructuredOutput
) -> None:
    with pytest.raises(SchemaTooComplex, match="too complex"):
        await checker.check(form)
    await checker.check(schema(PERSON))


async def test_finite_recursion_is_accepted(checker: GrammarChecker) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    await checker.check(schema(node))


def nested_choices(depth: int) -> dict[str, Any]:
    return {"anyOf": [nested_choices(depth - 1)]} if depth else {"type": "null"}


def ladder(steps: int) -> dict[str, Any]:
    """Return a schema each step of which needs the next one twice."""
    rungs: dict[str, Any] = {f"d{steps}": {"type": "null"}}
    for step in range(steps):
        next_step = {"$ref": f"#/$defs/d{step + 1}"}
        properties = {"a": next_step, "b": next_step}
        rungs[f"d{step}"] = {"type": "object", "properties": properties, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": rungs}


@pytest.mark.parametrize("document", [nested_choices(60), ladder(60)], ids=["choices", "ladder"])
def test_the_search_for_endless_recursion_visits_each_part_once(document: Any) -> None:
    assert find_endless(document) == ""


async def test_an_error_that_repeats_a_long_form_leaves_the_process_in_order(
    checker: GrammarChecker,
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
        await checker.check(StructuredOutput("regex", "a" * 60_000 + "("))
    assert len(caught.value.message) < 5000
    await checker.check(schema(PERSON))
    with pytest.raises(SchemaTooComplex):
        await checker.check(StructuredOutput("regex", "(x{1000}){1000}"))


async def test_a_cancelled_check_leaves_its_verdict_to_nobody_else(checker: GrammarChecker) -> None:
    async with BackgroundTasks() as tasks:
        for number in range(4):
            hostile = StructuredOutput("regex", f"(x{{1000}}){{100{number}}}")
            check = tasks.start(checker.check(hostile))
            await asyncio.sleep(0.01)
            check.cancel()
            await checker.check(schema(PERSON | {"title": str(number)}))


async def test_a_trial_process_that_died_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(schema(PERSON))
    process = checker._small.process
    assert process is not None
    process.kill()
    process.wait()
    await checker.check(StructuredOutput("json_object"))
    assert checker._small.process is not process


async def test_trials_keep_no_output_open_and_end_with_their_parent() -> None:
    """The end of a log pipe tells a supervisor at once that a process has died."""
    script = """
import asyncio, signal
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.checker import GrammarChecker
checker = GrammarChecker()
asyncio.run(checker.check(StructuredOutput("json_object")))
print(checker._small.process.pid, flush=True)
signal.pause()
"""
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    assert parent.stdout is not None
    trials = int(await parent.stdout.readline())
    (fork,) = map(int, Path(f"/proc/{trials}/task/{trials}/children").read_text().split())
    watches = [os.pidfd_open(pid) for pid in (trials, fork)]
    for pid in (trials, fork):
        os.kill(pid, signal.SIGSTOP)  # a busy machine gives a trial no time to end by itself
    parent.kill()
    assert await parent.stdout.read() == b""
    for watch in watches:
        await asyncio.to_thread(select.select, [watch], [], [])
        os.close(watch)
    await parent.wait()


async def test_trials_run_when_nothing_else_does(checker: GrammarChecker) -> None:
    """Linux divides CPU time among sessions, so that the process needs one of its own."""
    await checker.check(schema(PERSON))
    process = checker._small.process
    assert process is not None
    assert os.getsid(process.pid) == process.pid
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():
        assert group.read_text().endswith(f"nice {SMALL_NICENESS}\n")
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= SMALL_NICENESS


def tokenizer_ids(tokenizer: Any, text: str) -> list[int]:
    return list(memoryview(tokenizer.encode(text)).cast("I"))
