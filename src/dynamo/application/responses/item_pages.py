"""Pages of the items of stored responses. Items stay encoded: most are never sent."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from dynamo.application.responses.input_items import Item
from dynamo.core.errors import InvalidRequest

EncodedItems = list[msgspec.Raw]
EncodedTurn = tuple[bytes, Item | None]
"""The encoded input of a response, and its object if its answer belongs to the items, too."""


class ItemPage(NamedTuple):
    """Encoded items, their ids, and whether others follow."""

    items: EncodedItems
    ids: list[str]
    has_more: bool


class _ItemId(msgspec.Struct):
    id: str


def read_page(
    turns: Iterable[EncodedTurn], *, ascending: bool, limit: int, after: str | None
) -> ItemPage:
    """Return up to `limit` of the items of `turns`, those after the item `after`. Of turns that
    come last first no more are read than the page needs. Raises `InvalidRequest`."""
    ordered = reversed(list(turns)) if ascending else turns
    items = (item for turn in ordered for item in _items_of(*turn, ascending=ascending))
    if after is not None and not any(_id_of(item) == after for item in items):
        raise InvalidRequest(f"there is no item {after[:100]!r}", field="after")
    page = list(islice(items, limit + 1))
    shown = page[:limit]
    return ItemPage(shown, [_id_of(item) for item in shown], len(page) > limit)


def _items_of(blob: bytes, response: Item | None, *, ascending: bool) -> EncodedItems:
    items = msgspec.json.decode(blob, type=EncodedItems)
    if response is not None:
        items += [msgspec.Raw(msgspec.json.encode(item)) for item in response["output"]]
    return items if ascending else items[::-1]


def _id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_ItemId).id
