"""Chat templates that loop, recurse or multiply are refused in time, and ordinary ones are not."""

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo.core.errors import InvalidRequest, ModelUnavailable
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.template_bounds import TemplateTooCostly
from dynamo.models.template_sandbox import MAX_SOURCE_CHARS

BIG = "{% set big = 'abcdefghij' * 40000 %}"
DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}"
COSTLY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) if a < 0 %}{% endfor %}",
    "loop over a text": BIG + "{% for c in big %}{% endfor %}",
    "unused elements": "{% for a in range(99999) %}{{ loop.length }}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{% for i in range(9999) %}"
    "{% endfor %}{{ loop([1, 2]) if loop.depth < 30 }}{% endfor %}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "caller tree": "{% macro m(n) %}{% call twice(n) %}{{ m(n - 1) if n }}{% endcall %}{% endmacro %}"
    "{% macro twice(n) %}{{ caller() }}{{ caller() }}{% endmacro %}{{ m(25) }}",
    "block tree": "{% set ns = namespace(n=0) %}{% block b %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n % 40 %}{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}",
    "lazy filters": "{{ range(99999) | map('string') | map('upper') | list | length }}",
    "select": "{{ range(99999) | select('odd') | list | length }}",
    "time": BIG + "{% for a in range(9999) %}{{ (big | upper | lower) == big }}{% endfor %}",
    "unrolled": BIG + "{{ big | upper | length }}" * 2000,
    "power": "{{ 9**(9**9) }}",
    "product": "{% set ns = namespace(x=3) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "text times": "{{ 'a' * 10**9 }}",
    "times text": "{{ 10**9 * 'a' }}",
    "list times": "{{ [0] * 10**9 }}",
    "big list times": "{% set x = ['" + "a" * 999 + "'] * 1000 %}{{ x }}",
    "sum doubling": DOUBLE.replace("START", "'ab'").replace("STEP", "{% set ns.x = ns.x + ns.x %}"),
    "list doubling": DOUBLE.replace("START", "[1]").replace("STEP", "{% set ns.x = ns.x+ns.x %}"),
    "tilde doubling": DOUBLE.replace("START", "1").replace("STEP", "{% set ns.x = ns.x~ns.x %}"),
    "block doubling": DOUBLE.replace("START", "'ab'").replace(
        "STEP", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "macro doubling": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + DOUBLE.replace("START", "'ab'").replace("STEP", "{% set ns.x = m(ns.x) %}"),
    "straight doubling": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60,
    "tree": DOUBLE.replace("START", "1").replace("STEP", "{% set ns.x = [ns.x, ns.x] %}"),
    "dict tree": DOUBLE.replace("START", "1").replace("STEP", "{% set ns.x = dict(a=ns.x,b=ns.x) %}"),
    "tuple tree": DOUBLE.replace("START", "1").replace("STEP", "{% set ns.x = (ns.x, ns.x) %}"),
    "times tree": DOUBLE.replace("START", "1").replace("STEP", "{% set ns.x = [ns.x] * 2 %}"),
    "varargs tree": "{% macro m(x) %}{% set ns.x = varargs %}{% endmacro %}"
    + DOUBLE.replace("START", "1").replace("STEP", "{{ m(0, ns.x, ns.x) }}"),
    "output": BIG + "{% for a in range(9999) %}{{ big }}{% endfor %}",
    "captured output": BIG + "{% set x %}{% for a in range(9999) %}{{ big }}{% endfor %}{% endset %}",
    "kept values": BIG + "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}"
    "{% set ns.x = [ns.x, big ~ a] %}{% endfor %}",
    "kept slices": BIG + "{% set ns = namespace(x=1) %}{% for a in range(9999) %}"
    "{% set ns.x = [ns.x, big[1:]] %}{% endfor %}",
    "long sum": BIG + "{{ " + " + ".join(["big"] * 100) + " }}",
    "long concatenation": BIG + "{{ " + " ~ ".join(["big"] * 200) + " }}",
    "list of one text": BIG + "{% set ns = namespace(x=[big]) %}{% for i in range(12) %}"
    "{% set ns.x = ns.x + ns.x + [big] %}{% endfor %}{{ ns.x }}",
    "growing list": BIG + "{% set ns = namespace(x=[big]) %}{% for i in range(9999) %}"
    "{% set ns.x = [big] + ns.x %}{% endfor %}{{ ns.x }}",
    "printed list": "{% set a = range(99999) | list %}" + "{{ a }}" * 2000,
    "captured list": "{% set a = range(99999) | list %}{% set x %}" + "{{ a }}" * 2000
    + "{% endset %}",
    "texts of a list": BIG + "{% set a = [big, big, big, big, big, big] %}{{ a | string | length }}",
    "compared lists": "{% set a = range(99999) | list %}{% set b = range(99999) | list %}"
    + "{{ a == b }}" * 2000,
    "tested lists": "{% set a = range(99999) | list %}{% set b = range(99999) | list %}"
    + "{{ a is eq b }}" * 2000,
    "searched list": "{% set a = range(99999) | list %}" + "{{ 'x' in a }}" * 2000,
    "searched range": "{% set a = range(99999) %}" + "{{ 'x' in a }}" * 2000,
    "counted list": "{% set a = range(99999) | list %}" + "{{ a.count(1) }}" * 2000,
    "braces width": "{{ '{:>1000000000}'.format(1) }}",
    "computed width": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "braces map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "inserted often": BIG + "{{ '" + "{0}" * 9000 + "'.format(big) }}",
    "percent inserted often": BIG + "{{ '" + "%(x)s" * 9000 + "' % {'x': big} }}",
    "center": "{{ 'a' | center(10**9) }}",
    "mapped center": "{{ ['a'] | map('center', 10**9) | list }}",
    "indent": "{{ 'a\\nb' | indent(10**9) }}",
    "long indent": "{{ ('a\\n' * 100000) | indent(9000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ range(9999) | join('b' * 100000) }}",
    "join often": BIG + "{{ ([big] * 9000) | join }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 5 | round(-10**9) }}",
    "ceil": "{{ 5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "tojson": "{{ [[1]] | tojson(indent=10**9) }}",
    "method center": "{{ 'a'.center(10**9) }}",
    "item center": "{{ 'a'['center'](10**9) }}",
    "attr center": "{{ ('a' | attr('center'))(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "bytes": "{{ 'a'.encode().center(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "method replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "method join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "date": "{{ strftime_now('%c' * 100000) }}",
}  # fmt: skip
CONSTANT = {
    "parentheses": "{{" + "(" * 20000 + "1" + ")" * 20000 + "}}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "loops": "{% for a in b %}" * 40 + "{% endfor %}" * 40,
    "long": "a" * (MAX_SOURCE_CHARS + 1),
    "digits": "{{ " + "9" * 9999 + " }}",
    "removed filter": "{{ 'a' | urlize }}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
}


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Refuse allocations above 3 GB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY.keys())
def test_a_costly_template_is_refused_in_time(source):
    template = ChatTemplate(source)
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match="template") as caught:
        template.render([{"role": "user", "content": "Hi"}])
    assert time.thread_time() - started < 1
    assert not isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("source", CONSTANT.values(), ids=CONSTANT.keys())
def test_a_template_that_cannot_be_compiled_makes_the_model_unavailable(source):
    started = time.thread_time()
    with pytest.raises(ModelUnavailable, match="chat template is invalid") as caught:
        ChatTemplate(source)
    assert time.thread_time() - started < 5
    assert "chat_template" in caught.value.hint


def test_a_refusal_names_the_bound_and_is_remembered():
    template = ChatTemplate(COSTLY["loops"])
    assert not template.was_too_costly
    with pytest.raises(TemplateTooCostly, match=r"more than [0-9]+ steps") as caught:
        template.render([])
    assert caught.value.param == "messages"
    assert "chat_template" in caught.value.hint
    assert template.was_too_costly


CONVERSATION = [
    {"role": "system", "content": "Be\nkind. "},
    {
        "role": "user",
        "content": [{"type": "text", "text": "<b>Hi</b>"}, {"type": "text", "text": "x"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "x": [1]}}]},
    {"role": "tool", "content": "<think>a</think>b"},
    {"role": "user", "content": "And now?\tä\U0001f600"},
]
KNOWS_TOOLS = "{# tools #}"
"""Begins a template that gets calls as they are: without `tools`, they become text."""
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
ORDINARY = {
    "smollm": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'x' %}"
    "{{ '<|im_start|>system\\nYou are<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\\n' + (message['content'] | string) + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{{ 1 }}{% endif %}",
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex }}"
    "{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ (loop.nextitem or m).role }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.depth }}{% else %}-{% endfor %}",
    "filtered": "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ loop.length }}"
    "{% else %}none{% endfor %}{% for m in nothing %}{% else %}none{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}",
    "nested": "{% for m in messages %}{% for c in m.content or 'ab' %}{{ loop.index }}{{ c }}{% endfor %}"
    "{{ loop.index }}{% endfor %}",
    "recursive": "{% for k, v in tools[0].items() recursive %}{{ k }}{{ loop.depth }}"
    "{% if v is mapping %}{{ loop(v.items()) }}{% endif %}{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}{{ messages[-1].content }}"
    "{{ (messages | length - 1) - 1 }}{{ messages | map(attribute='role') | join(', ') }}",
    "namespace": "{% set ns = namespace(last=-1, text='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% set ns.text = ns.text ~ m.role ~ (loop.index + 1) %}{% endfor %}{{ ns.last }}{{ ns.text }}",
    "macro": "{% macro show(m, level=1, sep=', ') %}{{ m.role + sep * level }}{{ varargs | length }}"
    "{% if level < 3 %}{{ show(m, level + 1) }}{% endif %}{{ caller('x') if caller }}{% endmacro %}"
    "{{ show(messages[0], 2, '; ', 1, 2) }}{% call(y) show(messages[1]) %}{{ y }}!{% endcall %}",
    "sums": "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}"
    "{% endfor %}{{ ns.l }}{{ ns.l + [1] }}{{ (ns.l + ns.l) | length }}{{ 1 + 2 + 3 }}"
    "{{ 'a' + messages[0].role + 'b' + messages[1].role + messages[3].role + 'c' + messages[4].role }}"
    "{{ messages[0].role + messages[1].role }}{{ 1 ~ 2 ~ 'a' ~ none ~ ns.l ~ 1.5 ~ 7 ~ 8 ~ 9 ~ 10 }}"
    "{{ messages[0] }}{{ none }}{{ true }}{{ 1.5 }}{{ nothing }}{{ messages | length + 1 }}",
    "keys": "{% set d = {'_x': 1, 'items': 2, 'a b': 3} %}{{ d._x }}{{ d.items is callable }}"
    "{{ d['items'] }}{{ d.nothing is defined }}{{ d.nothing }}{{ d.get('_x') }}{{ d['a b'] }}",
    "set block": "{% set x | upper %}a{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}"
    "{% set y %}{{ x }}{% endset %}{{ x }}{{ y | trim | length }}{% filter lower %}A{% endfilter %}",
    "methods": "{% set c = messages[3].content %}{{ c.split('</think>')[-1].lstrip('\n') }}"
    "{{ c.replace('a', 'bb') }}{{ c.center(40) }}{{ ','.join(['a', 'b']) }}{{ c.startswith('<') }}"
    "{{ '{:>5}{}{{'.format(1, 'x') }}{{ '{a[role]}'.format_map({'a': messages[0]}) }}"
    "{{ messages[0].get('x', 'd') }}{{ messages[0].items() | list }}{{ c.upper().title() }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('content') | map(attribute='role') | list }}{{ [3, 1, 2] | sort }}"
    "{{ [1, 2, 3, 4] | batch(3, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 3.7 | round | int }}"
    "{{ 'a b' | replace(' ', '_') | title }}{{ tools | tojson(indent=2) }}{{ 'x' | indent(4, true) }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1, 2] | unique | list }}{{ [1, 2] | sum }}"
    "{{ '%s-%05.2f' | format('a', 1.5) }}{{ nothing | default('d') }}{{ 'abc' | reverse }}"
    "{{ nothing | map('upper') | list }}{{ none | map('upper') | list }}{{ '7' | int + 1 }}"
    "{{ messages | groupby('role') | map(attribute='grouper') | list }}{{ 'a,b' | string }}",
    "operators": "{{ 7 % 3 }}{{ '%s%%' % 5 }}{{ '%s %s' % ('a', 1) }}{{ 2 ** 10 }}{{ '=' * 20 }}"
    "{{ [1] * 3 }}{{ 3 * 'ab' }}{{ 1.5 * 2 }}{{ [1] + [2] + messages[:1] }}{{ 7 // 2 }}{{ -1 }}"
    "{{ 'a' ~ 1 ~ none }}{{ (1, 2) + (3,) }}{{ 'x' in messages[0] }}{{ 1 < 2 < 3 }}"
    "{{ messages[0].role == messages[1].role }}{{ 'a' if true }}{{ dict(a=1, **{'b': [2]}) }}",
    "loop outside": "{{ loop }}|{% for m in messages %}{% macro f() %}{{ loop }}{% endmacro %}"
    "{{ f() }}{% endfor %}",
    "user's loop": "{% set loop = messages[0] %}{{ loop.role }}{{ loop.first is defined }}",
}  # fmt: skip

FAILING = (
    "{{ messages[0].role + 1 }}",
    "{{ messages[2].content + 'x' }}",
    "{{ nothing.x }}",
    "{% for m in messages[2].content %}{% endfor %}",
    "{{ none | join }}",
)


def plain_render(source: str, **variables: object) -> str:
    """Render in jinja2's own sandbox, without bounds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize("source", ORDINARY.values(), ids=ORDINARY.keys())
def test_bounds_do_not_change_ordinary_templates(source):
    variables = {"tools": TOOLS, "add_generation_prompt": True, "documents": None}
    template = ChatTemplate(KNOWS_TOOLS + source)
    messages = template._plain.forms.adapt(CONVERSATION)
    expected = plain_render(source, messages=messages, **variables)
    assert template.render(CONVERSATION, TOOLS) == expected


@pytest.mark.parametrize("source", FAILING)
def test_bounds_do_not_change_the_errors_of_templates(source):
    template = ChatTemplate(KNOWS_TOOLS + source)
    with pytest.raises(Exception) as plain:
        plain_render(source, messages=template._plain.forms.adapt(CONVERSATION))
    with pytest.raises(InvalidRequest) as caught:
        template.render(CONVERSATION)
    assert str(plain.value) in str(caught.value)


def test_the_bounds_grow_with_the_request():
    quadratic = (
        "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
    )
    many = [{"role": "user", "content": "x"}] * 300
    assert ChatTemplate(quadratic).render(many) == "x" * 300
    growing = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}"
        "{% endfor %}{{ ns.x }}"
    )
    long = [{"role": "user", "content": "x" * 1_000_000}] * 5
    assert len(ChatTemplate(growing).render(long)) == 5_000_000
    linear = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    thousands = [{"role": "user", "content": "Hello"}] * 50_000
    assert len(ChatTemplate(linear).render(thousands)) == 11 * 50_000
