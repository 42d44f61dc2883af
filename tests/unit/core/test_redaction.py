"""Credentials that nobody shows."""

from __future__ import annotations

import pytest

from dynamo.core.redaction import REDACTED, redact_credentials


@pytest.mark.parametrize("name", ["hf_token", "api_key", "s3.secret", "PASSWORD", "api-keys"])
def test_a_value_under_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert redact_credentials({name: "word"}) == {name: REDACTED}
    assert redact_credentials({"outer": {name: ["word"]}}) == {"outer": {name: REDACTED}}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "monkey", "keyframes"])
def test_other_values_are_shown(name: str) -> None:
    assert redact_credentials({name: "word"}) == {name: "word"}


def test_an_empty_secret_is_shown_as_empty() -> None:
    assert redact_credentials({"hf_token": None}) == {"hf_token": None}
