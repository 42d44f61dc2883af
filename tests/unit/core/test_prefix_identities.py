"""Identities of blocks: what clients cannot forge, the same in every process."""

from __future__ import annotations

from dynamo.core.codec import pack_ids
from dynamo.core.hashing import IDENTITY_BYTES, prefix_identities, root_identity


def identities(tokens: list[int], salt: str = "") -> list[bytes]:
    return prefix_identities(pack_ids(tokens), 4, root_identity(salt))


def test_an_identity_covers_all_tokens_before_and_the_salt() -> None:
    tokens = list(range(12))
    expected = identities(tokens)

    assert [len(identity) for identity in expected] == [IDENTITY_BYTES] * 3
    assert identities(tokens[:8]) == expected[:2]
    assert identities([99, *tokens[1:]])[1:] != expected[1:]
    assert not set(identities(tokens, "tenant")) & set(expected)
    assert prefix_identities(pack_ids(tokens[4:]), 4, expected[0]) == expected[1:]


def test_identities_are_the_same_in_every_process() -> None:
    assert identities([1, 2, 3, 4])[0].hex() == "b6ae3ebe8b6acf139c20533acb49148e"
