"""Removal of credentials from text that users, logs and pages show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"
_SECRET_NAME = re.compile(r"(?i)(^|[_.-])(token|keys?|secret|password|credentials?)$")
_URL_REST = re.compile(r"[^\s'\"]*")
_CREDENTIALS = re.compile(r"(?:^|(?<=,))[^,]*@")


def redact_urls(text: str) -> str:
    """Replace user, password or token of every URL in `text`: `nats://***@host`.

    Every host of a list such as `etcd://user:word@host,user:word@host` is redacted. The time is
    linear in the length of `text`.
    """
    if "@" not in text or "://" not in text:
        return text
    head, *rests = text.split("://")
    return "://".join([head, *(_URL_REST.sub(_redact_userinfo, rest, 1) for rest in rests)])


def redact_credentials(value: Any) -> Any:
    """Redact the URLs in a value of the settings: a text, or a list or mapping that holds texts. In
    a mapping, such as the arguments of an engine, the value of a name like `hf_token` is hidden."""
    if isinstance(value, str):
        return redact_urls(value)
    if isinstance(value, Mapping):
        return {
            key: REDACTED if item and _SECRET_NAME.search(str(key)) else redact_credentials(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redact_credentials(item) for item in value)
    return value


def _redact_userinfo(url_rest: re.Match[str]) -> str:
    return _CREDENTIALS.sub(f"{REDACTED}@", url_rest[0])
