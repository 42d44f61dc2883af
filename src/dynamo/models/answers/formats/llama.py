"""Calls of Llama's models: JSON objects (Llama 3) and Python calls (Llama 4), without markers."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from dynamo.models.answers.call_grammar import CallGrammar
from dynamo.models.answers.json_scanner import read_call_object
from dynamo.models.answers.scanner import Scanner, WaitingBool, WaitingText
from dynamo.models.answers.values import MAX_PYTHON_CHARS, python_to_json, value_to_json
from dynamo.models.answers.writer import AnswerWriter, json_string

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_TEXTS = {
    "": re.compile(r"""[^'"()\[\]{}]+"""),
    "'": re.compile(r"(?:[^'\\]+|\\.)+", re.DOTALL),
    '"': re.compile(r'(?:[^"\\]+|\\.)+', re.DOTALL),
}
"""Text of a call by the quote that is open."""
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_UNTYPED = frozenset[str]()
MAX_DEPTH = 64


def read_object(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read a call object, and the semicolon behind it."""
    if not (yield from read_call_object(scan, writer, strict=True)):
        return False
    scan.begin_record()
    if (yield from scan.peek()) == ";":
        scan.take(1)
    else:
        scan.unread()
    return True


def read_python_calls(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read `[f(a=1), g()]` at the start of an answer."""
    if writer.wrote_text:
        return False
    scan.take(1)
    while True:
        yield from scan.peek()
        name, _ = yield from scan.take_until("(")
        if _NAME.fullmatch(name) is None or name not in writer.tools:
            return False
        text = yield from _take_balanced(scan)
        arguments = _keyword_arguments(writer.literal(text), writer)
        if arguments is None:
            return False
        writer.open_call(name)
        writer.arguments(arguments)
        writer.close_call()
        scan.begin_record()
        char = yield from scan.peek()
        if char not in (",", "]"):
            return True
        scan.take(1)
        if char == "]":
            return True


def _take_balanced(scan: Scanner) -> WaitingText:
    """Read up to the bracket that closes a call, and return the text before it."""
    closers, quote, parts, chars = [")"], "", list[str](), 0
    while chars <= MAX_PYTHON_CHARS:
        text = _TEXTS[quote].match(scan.text, scan.position)
        if text is not None:
            parts.append(scan.take_to(text.end()))
            chars += len(parts[-1])
            continue
        char = scan.text[scan.position : scan.position + 1]
        if char in ("", "\\"):
            if not (yield from scan.more()):
                return "("
            continue
        parts.append(scan.take(1))
        chars += 1
        if quote:
            quote = ""
        elif char in "'\"":
            quote = char
        elif char == closers[-1]:
            closers.pop()
            if not closers:
                return "".join(parts[:-1])
        elif char in _CLOSERS and len(closers) < MAX_DEPTH:
            closers.append(_CLOSERS[char])
        else:
            return "("  # a wrong bracket: no call
    return "("


def _keyword_arguments(text: str, writer: AnswerWriter) -> str | None:
    """Return the JSON of `a=1, b="x"`, None for anything else."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        return None
    pairs = []
    for keyword in call.keywords:
        value = python_to_json(keyword.value)
        if keyword.arg is None or not value:
            return None
        if value.startswith(("{", "[")):
            value = value_to_json(value, _UNTYPED, writer.is_clean)
        pairs.append(f"{json_string(keyword.arg)}: {value}")
    return "{" + ", ".join(pairs) + "}"


def object_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of a JSON object, which Llama 4 writes, too."""
    return grammar.json_call(f'{{"name": "{name}", "parameters": ', schema, "}")
