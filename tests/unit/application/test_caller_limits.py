"""Priorities are clamped, and callers with different API keys share no cached prompts."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.application.access import CallerLimits
from dynamo.application.responses.handler import MAX_RUNNING, BackgroundResponses
from dynamo.communication.http import Request
from dynamo.core.errors import ConfigError, Overloaded
from dynamo.core.settings import resolve_settings
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.settings.values import SourcedValue
from dynamo.core.text import TextOptions

BODY = {"model": "words", "messages": [{"role": "user", "content": "one two three"}]}
KEYS = ("sesame", "open")
UNUSED: Any = (None, None, None)


def request_of(key: str) -> Request:
    return Request("POST", b"/v1/completions", {b"authorization": f"Bearer {key}".encode()})


@pytest.mark.parametrize(
    ("bounds", "requested", "effective"),
    [
        ((0, 0), 0, 0),
        ((0, 0), 1 << 31, 0),
        ((0, 0), -(1 << 31), 0),
        ((-5, 10), 7, 7),
        ((-5, 10), 11, 10),
        ((-5, 10), -6, -5),
        ((2, 3), 0, 2),
    ],
)
async def test_the_priority_of_a_client_is_clamped(
    open_site: Any, connect: Any, bounds: tuple[int, int], requested: int, effective: int
) -> None:
    site = await open_site(priority_range=bounds)
    async with connect(site.port) as connection:
        connection.ask("POST", "/v1/chat/completions", BODY | {"priority": requested})
        assert (await connection.answer()).status == 200
        body = {"model": "words", "prompt": ["a b", "c"], "priority": requested}
        connection.ask("POST", "/v1/completions", body)
        assert (await connection.answer()).status == 200
        tier = {"priority": None, "service_tier": "priority"}
        for path, fields in (("chat/completions", BODY), ("completions", body)):
            connection.ask("POST", f"/v1/{path}", fields | tier)
            assert (await connection.answer()).status == 200
    priorities = [request.options.priority for request in site.processor.requests]
    assert priorities == [effective] * 3 + [bounds[1]] * 3


@pytest.mark.parametrize("bounds", ["1,0", "1", "0,1,2", ""])
def test_a_range_has_two_ends(bounds: str) -> None:
    flags = {"server.priority_range": SourcedValue(bounds, "flag --x")}
    with pytest.raises(ConfigError, match="smallest and the largest"):
        resolve_settings(flags)
    good = {"server.priority_range": SourcedValue("-3, 4", "flag --x")}
    assert resolve_settings(good).settings.server.priority_range == (-3, 4)


async def test_each_of_several_keys_has_its_own_salt(open_site: Any, connect: Any) -> None:
    site = await open_site(api_keys=KEYS)
    async with connect(site.port) as connection:
        for key in ("Bearer sesame", "bearer  sesame", "Bearer open"):
            for fields in ({}, {"cache_salt": "mine"}):
                headers = {"authorization": key}
                connection.ask("POST", "/v1/chat/completions", BODY | fields, headers)
                assert (await connection.answer()).status == 200
    salts = [request.options.salt for request in site.processor.requests]
    assert salts[:2] == salts[2:4]
    assert len(set(salts)) == 4
    assert not any(word in salt for salt in salts for word in (*KEYS, "mine"))
    assert {len(salt) for salt in salts} == {32}


def test_a_salt_of_another_caller_cannot_be_requested() -> None:
    limits = CallerLimits(ServerSettings(api_keys=KEYS), share_cache=False)
    own = limits.apply(TextOptions(), request_of("sesame")).salt
    assert limits.apply(TextOptions(salt=own), request_of("open")).salt != own
    assert limits.apply(TextOptions(), request_of("open")).salt != own


@pytest.mark.parametrize(
    ("keys", "share_cache"), [((), False), (("a",), False), (("a", "a"), False), (KEYS, True)]
)
def test_otherwise_salts_stay_as_they_are(keys: tuple[str, ...], share_cache: bool) -> None:
    limits = CallerLimits(ServerSettings(api_keys=keys), share_cache=share_cache)
    assert limits.needed == (keys == KEYS)
    assert limits.apply(TextOptions(salt="s"), request_of("a")).salt == "s"


def test_several_keys_are_several_callers() -> None:
    limits = CallerLimits(ServerSettings(api_keys=KEYS), share_cache=True)
    callers = [limits.apply(TextOptions(), request_of(key)).caller for key in (*KEYS, *KEYS)]
    assert callers[:2] == callers[2:]
    assert len({*callers}) == 2
    assert not any(word in caller for caller in callers for word in KEYS)
    alone = CallerLimits(ServerSettings(api_keys=("a",)), share_cache=False)
    assert alone.apply(TextOptions(), request_of("a")).caller == ""


def test_one_key_cannot_take_all_places_of_background_responses() -> None:
    responses = BackgroundResponses(*UNUSED, several_owners=True)
    for _ in range(MAX_RUNNING // 2):
        responses._take_place("ann")
    with pytest.raises(Overloaded, match="of this API key"):
        responses._take_place("ann")
    responses._take_place("bob")
    alone = BackgroundResponses(*UNUSED)
    for _ in range(MAX_RUNNING):
        alone._take_place("")
    with pytest.raises(Overloaded, match=f"{MAX_RUNNING} responses"):
        alone._take_place("")
