"""Objects in Kubernetes' protobuf form, of the kinds that `kubectl create` and `drain` send so."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object

MAGIC = b"k8s\x00"
Fields = Mapping[int, tuple[str, Any]]
"""Names of fields by their numbers, each with its form, or with the fields of a message."""
TEXT, NUMBER, TEXTS, DATA = "text", "number", "texts", "data"
METADATA = (
    "metadata",
    {1: ("name", TEXT), 2: ("generateName", TEXT), 3: ("namespace", TEXT), 11: ("labels", TEXTS),
     12: ("annotations", TEXTS)},
)  # fmt: skip
OPTIONS: Fields = {
    1: ("gracePeriodSeconds", NUMBER),
    2: ("preconditions", {1: ("uid", TEXT), 2: ("resourceVersion", TEXT)}),
    4: ("propagationPolicy", TEXT),
}
KINDS: Mapping[str, Fields] = {
    "Namespace": {1: METADATA},
    "ServiceAccount": {1: METADATA},
    "ConfigMap": {1: METADATA, 2: ("data", TEXTS), 3: ("binaryData", DATA)},
    "Secret": {1: METADATA, 2: ("data", DATA), 3: ("type", TEXT), 4: ("stringData", TEXTS)},
    "Eviction": {1: METADATA, 2: ("deleteOptions", OPTIONS)},
    "DeleteOptions": OPTIONS,
    "TokenRequest": {},
}


def decode(data: bytes) -> Object:
    """Return an object. Raises `ApiFailure` 415 for a kind that is not known in this form."""
    envelope = {1: ("type", {1: ("apiVersion", TEXT), 2: ("kind", TEXT)}), 2: ("raw", None)}
    outer = _message(data.removeprefix(MAGIC), envelope)
    fields = KINDS.get(outer["type"].get("kind", ""))
    if fields is None:
        text = f"the server reads {outer['type'].get('kind')} as JSON and YAML, not as protobuf: "
        raise ApiFailure(415, f"{text}write it and use kubectl apply")
    return {**outer["type"], **_message(outer.get("raw", b""), fields)}


def _message(data: bytes, fields: Fields) -> Object:
    item: Object = {}
    for number, value in _parts(data):
        name, form = fields.get(number, ("", TEXT))
        if form == TEXT:
            if name and value:
                item[name] = value.decode()
        elif form in (TEXTS, DATA):
            entry = dict(_parts(value))
            content = entry.get(2, b"")
            text = content.decode() if form == TEXTS else base64.b64encode(content).decode()
            item.setdefault(name, {})[entry.get(1, b"").decode()] = text
        elif isinstance(form, dict):
            item[name] = _message(value, form)
        elif name:
            item[name] = value
    return item


def _parts(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of fields: a number, or the bytes of anything else."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        value: Any = number()
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        yield tag >> 3, value
