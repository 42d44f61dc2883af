"""The page of /router/view: one file, its data within."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

DATA_PLACEHOLDER = b"{{data}}"
LIVE_PLACEHOLDER = b"{{live}}"


@cache
def _page_template() -> bytes:
    return files(__package__).joinpath("routing_page.html").read_bytes()


def render_page(data: bytes, *, live: bool) -> bytes:
    """`data`: a JSON object with `samples` and, if there is one, `report`. `live`: the page asks
    its server for more."""
    safe = data.replace(b"<", b"\\u003c")
    return (
        _page_template()
        .replace(LIVE_PLACEHOLDER, b"true" if live else b"false")
        .replace(DATA_PLACEHOLDER, safe)
    )
