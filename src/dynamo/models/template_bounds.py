"""Bounds of one rendering of a chat template: steps, CPU time and sizes of values.

The bounds grow with the request, so that long conversations pass. All but the CPU time depend only
on the template and the request. CPU time is the net below the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from time import thread_time
from typing import Any

from dynamo.core.errors import InvalidRequest

STEPS_PER_CHECK = 64
BASE_STEPS, STEPS_PER_VALUE = 20_000, 200
BASE_CPU_S, CPU_S_PER_VALUE, CPU_S_PER_CHAR = 0.1, 20e-6, 0.1e-6
BASE_CHARS, CHARS_PER_VALUE, CHARS_PER_CHAR = 500_000, 32, 4
ALLOCATION_FACTOR = 20
"""All larger values of a rendering together may have this multiple of the size of a single one."""
SMALL_CHARS = 4096
"""Smaller values are not counted."""
MAX_NUMBER_BITS = 16_384
MAX_ARGUMENT = 10_000
"""The greatest width, count or precision that a filter or a method may be given."""
MAX_CAPTURED_CHARS = 1 << 28
MAX_MEASURED_VALUES = 10_000_000
MAX_TREE_VALUES = 10_000
MAX_UNSEARCHED = 64
"""Elements by which a long list may grow before its tree is checked again."""
SCALAR_CHARS = 8

_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d*\.\*|\d{5}|\d*\.\d{5})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5})")
_SIZED = (str, bytes, list, tuple)


class TemplateTooCostly(InvalidRequest):
    """A chat template exceeded a bound of its rendering."""


class RenderBudget:
    """The steps, CPU seconds and characters that one rendering may still use.

    An iterator yields True once for each step and raises `TemplateTooCostly` beyond the bound. An
    element of a list counts as a character. `variables` are measured only above the base bounds.
    """

    _measured = False
    _steps = _allocated = 0
    _max_steps, _max_cpu_s, _max_chars = BASE_STEPS, BASE_CPU_S, float(BASE_CHARS)
    _started_s: float | None = None

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = variables

    def __iter__(self) -> Iterator[bool]:
        return chain.from_iterable(self._grant_steps())

    def check_time(self) -> None:
        """Raise `TemplateTooCostly` after too much CPU time of this thread."""
        now = thread_time()
        if self._started_s is None:
            self._started_s = now
        elif now - self._started_s > self._max_cpu_s:
            self._measure()
            if now - self._started_s > self._max_cpu_s:
                raise _too_costly(f"takes longer than {self._max_cpu_s:.2g} s of CPU time")

    def check_chars(self, chars: float) -> None:
        """Raise `TemplateTooCostly` for a value of this size, before or after its creation."""
        if chars > self._max_chars:
            self._measure()
            if chars > self._max_chars:
                raise _too_costly(f"makes a text or list of over {self._max_chars:.0f} characters")

    def bounded(self, value: Any) -> Any:
        """Return a created value, and count its size if it is large."""
        if isinstance(value, _SIZED):
            size = len(value)
            if size > SMALL_CHARS:
                self._allocate(size)
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        return value

    def _allocate(self, chars: int) -> None:
        self.check_time()
        self.check_chars(chars)
        self._allocated += chars
        self.check_chars(self._allocated / ALLOCATION_FACTOR)

    def check_tree(self, value: Any) -> None:
        """Raise `TemplateTooCostly` for nested containers of too many values in all.

        A container that occurs twice counts twice, since comparing and printing visit it twice.
        """
        values, chars = measure([value], MAX_TREE_VALUES)
        if values > MAX_TREE_VALUES:
            self._measure()
            values, chars = measure([value], int(self._max_chars))
        self.check_chars(max(values, chars))

    def _grant_steps(self) -> Iterator[Iterator[bool]]:
        while True:
            yield repeat(True, STEPS_PER_CHECK)
            self._steps += STEPS_PER_CHECK
            self.check_time()
            if self._steps >= self._max_steps:
                self._measure()
                if self._steps >= self._max_steps:
                    raise _too_costly(f"needs more than {self._max_steps} steps")

    def _measure(self) -> None:
        """Raise the bounds to those of the request's size."""
        if self._measured:
            return
        self._measured = True
        values, chars = measure(self._variables.values(), MAX_MEASURED_VALUES)
        self._max_steps = BASE_STEPS + STEPS_PER_VALUE * values
        self._max_cpu_s = BASE_CPU_S + CPU_S_PER_VALUE * values + CPU_S_PER_CHAR * chars
        self._max_chars = BASE_CHARS + CHARS_PER_VALUE * values + CHARS_PER_CHAR * chars


def measure(roots: Iterable[Any], max_values: int) -> tuple[int, int]:
    """Return the number of values in nested containers and their characters.

    Counting stops above `max_values`.
    """
    values = chars = 0
    stack = list(roots)
    while stack and values <= max_values:
        value = stack.pop()
        values += 1
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            values += len(value)
            chars += sum([len(key) for key in value if isinstance(key, str)])
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
        else:
            chars += SCALAR_CHARS
    return values, chars


def add(budget: RenderBudget, left: Any, right: Any) -> Any:
    """Return `left + right` within the bounds. Slowly growing lists are searched at times."""
    value = left + right
    if isinstance(value, list | tuple) and len(value) > SMALL_CHARS:
        longer = max(len(left), len(right))
        added = len(value) - longer
        if added > MAX_UNSEARCHED or longer // MAX_UNSEARCHED != len(value) // MAX_UNSEARCHED:
            budget.check_tree(value)
    return budget.bounded(value)


def multiply(budget: RenderBudget, left: Any, right: Any) -> Any:
    """Return `left * right` within the bounds."""
    if isinstance(right, _SIZED):
        left, right = right, left
    if isinstance(left, _SIZED) and isinstance(right, int):
        budget.check_chars(sum(measure([left], MAX_MEASURED_VALUES)) * right)
    elif isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return budget.bounded(left * right)


def power(budget: RenderBudget, left: Any, right: Any) -> Any:
    """Return `left ** right` within the bounds."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return budget.bounded(left**right)


def modulo(budget: RenderBudget, left: Any, right: Any) -> Any:
    """Return `left % right`, which formats a text, within the bounds."""
    if isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        check_percent_format(budget, text, right if isinstance(right, tuple) else (right,))
    return budget.bounded(left % right)


def check_percent_format(budget: RenderBudget, text: str, arguments: Iterable[Any]) -> None:
    """Refuse wide fields and too many insertions of large values."""
    _check_format(budget, _WIDE_PERCENT.search(text), text.count("%"), arguments)


def check_brace_format(budget: RenderBudget, text: str, arguments: Iterable[Any]) -> None:
    """Refuse wide or computed widths and too many insertions of large values."""
    wide = _WIDE_BRACES.search(text.replace("{{", ""))
    _check_format(budget, wide, text.count("{"), arguments)


def _check_format(
    budget: RenderBudget, wide: re.Match[str] | None, insertions: int, arguments: Iterable[Any]
) -> None:
    if wide:
        raise _too_costly("formats a text with an excessive width")
    _, chars = measure(arguments, MAX_MEASURED_VALUES)
    budget.check_chars(insertions * chars)


def check_replace(budget: RenderBudget, text: Any, old: Any, new: Any, *_: Any) -> None:
    """Refuse a replacement with an excessive result."""
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        budget.check_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(budget: RenderBudget, separator: Any, parts: Iterable[Any]) -> list[Any]:
    """Return the parts of a text to join. Refuses an excessive result."""
    joined = list(parts)
    _, chars = measure(joined, MAX_MEASURED_VALUES)
    budget.check_chars(chars + len(joined) * len(str(separator)))
    return joined


def check_arguments(budget: RenderBudget, value: Any, arguments: Iterable[Any]) -> None:
    """Refuse excessive numbers, and widths that multiply a long text."""
    growth = 0
    for argument in arguments:
        if isinstance(argument, int):
            growth = max(growth, abs(argument))
        elif isinstance(argument, str):
            growth = max(growth, len(argument))
    if growth > MAX_ARGUMENT:
        raise _too_costly(f"gives a filter or method a number or text above {MAX_ARGUMENT}")
    if growth and isinstance(value, str):
        budget.check_chars((value.count("\n") + 1) * growth)


def join_captured(parts: Iterable[str]) -> str:
    """Join the output that a block or macro captured."""
    captured = list(parts)
    if sum(map(len, captured)) > MAX_CAPTURED_CHARS:
        raise _too_costly(f"captures over {MAX_CAPTURED_CHARS} characters")
    return "".join(captured)


def _check_bits(bits: int) -> None:
    if bits > MAX_NUMBER_BITS:
        raise _too_costly("makes an excessive number")


def _too_costly(what: str) -> TemplateTooCostly:
    return TemplateTooCostly(
        f"the model's chat template {what} for these messages",
        hint="correct the model's chat_template, which may loop, or send less",
        param="messages",
    )
