"""Which store a charter names."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from paceline.errors import ExchangeError, nearest
from paceline.exchange.directory import Directory
from paceline.exchange.membership.charge import name_of
from paceline.exchange.membership.etcd import Etcd
from paceline.exchange.membership.redis import Redis
from paceline.exchange.membership.store import Journal, Store

_KINDS: Final = ("embedded", "etcd", "redis", "rediss")


def opened(text: str, directory: Directory) -> Store:
    """Return the store that a text names: `embedded`, `etcd://host:port/prefix` or `redis://host:port/db`.

    Raises:
        ExchangeError: it is none of these, or needs a package that is not there.
    """
    if text == "embedded":
        return Journal(directory.journal)
    kind, host, port, path = _parts(text)
    if kind == "etcd" and host:
        return Etcd(host, port or 2379, path.strip("/"), name_of(directory.read_secret()))
    if kind in ("redis", "rediss") and host:
        return Redis(text, name_of(directory.read_secret()))
    given = kind or text
    raise ExchangeError(
        f"cannot read the store '{text}'; write embedded, etcd://host:port/prefix or redis://host:port/db."
        f"{nearest(given, _KINDS) if given not in _KINDS else ''}"
    )


def _parts(text: str) -> tuple[str, str, int | None, str]:
    try:
        parts = urlsplit(text)
        return parts.scheme, parts.hostname or "", parts.port, parts.path
    except ValueError:
        return "", "", None, ""
