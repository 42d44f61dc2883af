"""Tables of the parameters of requests by our names and those of engines."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, Unsupported
from dynamo.core.values import GenerateRequest, StructuredOutput, StructureKind

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this choose the most probable token, as in vLLM."""


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of requests, which the engine knows as `name`.

    `source`: its place in a `GenerateRequest`. `convert` turns the value there into the engine's.
    The value `absent` is left out. `if_greedy`: the value where the most probable token is chosen.
    `refused`: the engine lacks the parameter; what a user can do.
    """

    source: str
    name: str = ""
    convert: Callable[[Any], Any] | None = None
    absent: Any = msgspec.UNSET
    if_greedy: Any = msgspec.UNSET
    refused: str = ""


class Seed(msgspec.Struct, frozen=True):
    """The seed of an engine, `below` a limit. Choices have different seeds, and a resumed answer
    does not repeat its random numbers. Without `if_random` only seeds that clients ask for are
    sent, and without `if_greedy` only for requests that draw a token."""

    name: str
    below: int
    if_random: bool = True
    if_greedy: bool = True


def same(*names: str) -> tuple[Parameter, ...]:
    """Return rows of parameters whose names and values are the same."""
    return tuple(Parameter(name, name.rpartition(".")[2]) for name in names)


class ParameterTable:
    """The parameters of the engine `title`. `names`: all that may be sent to the engine."""

    def __init__(self, title: str, *rows: Parameter, seed: Seed | None = None) -> None:
        plain = [row for row in rows if row == Parameter(row.source, row.name)]
        self._title = title
        self._names = [row.name for row in plain]
        self._others = [row for row in rows if row not in plain]
        self._read = attrgetter(*(row.source for row in (*plain, *self._others)))
        self._seed = seed
        self.names = frozenset(row.name for row in rows) | ({seed.name} if seed else set())

    def translate(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the engine's parameters. Raises `Unsupported` for what it lacks."""
        values, sampling, seed = self._read(request), request.sampling, self._seed
        parameters = dict(zip(self._names, values, strict=False))
        is_greedy = sampling.temperature < GREEDY_TEMPERATURE
        for row, value in zip(self._others, values[len(parameters) :], strict=True):
            if row.refused:
                if value:
                    name = row.source.rpartition(".")[2]
                    raise Unsupported(f"{self._title} has no {name}", param=name, hint=row.refused)
            elif is_greedy and row.if_greedy is not msgspec.UNSET:
                parameters[row.name] = row.if_greedy
            elif value != row.absent:
                parameters[row.name] = value if row.convert is None else row.convert(value)
        if seed is not None and not (
            (sampling.random_seed and not seed.if_random) or (is_greedy and not seed.if_greedy)
        ):
            number = sampling.seed + request.choice + (request.resumed << 20)
            parameters[seed.name] = number % seed.below
        return parameters


def check_extra(extra: Mapping[str, Any], *own: Container[str]) -> None:
    """Raise `InvalidRequest` if a caller sets one of our `own` parameters beside the request."""
    for name in extra:
        if any(name in names for names in own):
            raise InvalidRequest(f"extra: {name} is set by dynamo", param=name)


class FormTable(msgspec.Struct, frozen=True):
    """The structured outputs that the engine `title` enforces: its field for each kind, and what
    its value is made of ours by. `hint`: what to use instead of the others."""

    title: str
    rows: Mapping[StructureKind, tuple[str, Callable[[str], Any]]]
    hint: str = "use a JSON schema"

    def translate(self, structured: StructuredOutput | None) -> dict[str, Any]:
        """Return the engine's field, {} for any text. Raises `Unsupported` for a structured output
        that it lacks, `InvalidRequest` for one that cannot be read."""
        if structured is None or structured.kind == "text":
            return {}
        kind = structured.kind
        if kind not in self.rows:
            raise Unsupported(
                f"{self.title} has no {kind} for a structured output",
                hint=self.hint,
                param="response_format",
            )
        name, convert = self.rows[kind]
        try:
            return {name: convert(structured.value)}
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"not a {kind}: {error}", param="response_format") from None


decode_json = msgspec.json.Decoder().decode
decode_choices = msgspec.json.Decoder(list[str]).decode
raw_json = msgspec.json.Decoder(msgspec.Raw).decode
"""Returns a JSON text as it is, to be part of another."""


GUIDED_DECODING: Mapping[StructureKind, tuple[str, Callable[[str], Any]]] = {
    "json_schema": ("json", str),
    "json_object": ("json_object", lambda _: True),
    "regex": ("regex", str),
    "choice": ("choice", decode_json),
    "grammar": ("grammar", str),
}
"""Rows of a `FormTable` with the names of vLLM, which others have taken over."""


def enum_schema(choices: str) -> str:
    """Return the JSON schema of one of several texts."""
    return msgspec.json.encode({"enum": decode_choices(choices)}).decode()


def text_keys(logit_bias: Mapping[int, float]) -> dict[str, float]:
    """Return a bias by ids as text, as JSON has it."""
    return {str(token): bias for token, bias in logit_bias.items()}


def minus_one_for_none(top_k: int) -> int:
    """Return `top_k`, with -1 for no limit."""
    return top_k or -1
