"""Which store a charter names."""

from __future__ import annotations

from urllib.parse import urlsplit

from paceline.errors import ExchangeError, nearest
from paceline.exchange.directory import Directory
from paceline.exchange.membership.store import Journal, Store


def opened(text: str, directory: Directory) -> Store:
    """Return the store that a text names: `embedded`, `etcd://host:port/prefix` or `redis://host:port/db`.

    Raises:
        ExchangeError: it is none of these.
    """
    if text == "embedded":
        return Journal(directory.journal)
    kind = urlsplit(text).scheme
    raise ExchangeError(
        f"cannot read the store '{text}'; write embedded, etcd://host:port/prefix or redis://host:port/db."
        f"{nearest(kind or text, ['embedded', 'etcd', 'redis'])}"
    )
