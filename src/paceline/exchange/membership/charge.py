"""Who is in charge of a job's records, where they are in a store that others can reach too.

The coordinator in charge renews a lease on the store; once that has passed, another may take charge, and what the first
still tries to write is refused. If the first was of this host and has ended, nobody waits for its lease.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from typing import Final, TypeVar

from paceline.errors import ExchangeError
from paceline.exchange.membership.seats import Process

_T = TypeVar("_T")
_LOG: Final = logging.getLogger(__name__)

LEASE_S: Final = 6
"""Of the coordinator in charge, on its store."""

_WAIT_S: Final = LEASE_S + 1.0
"""How long who is in charge is waited for: if it is gone, its lease has passed by then."""

_RETRY_S: Final = 0.2
_PATIENCE_S: Final = 60.0
"""How long a store that cannot be reached is waited for."""


def name_of(secret: bytes) -> str:
    """Return what a job is called where several keep their records: its secret is no other job's."""
    return sha256(b"store " + secret).hexdigest()[:16]


def token() -> str:
    """Return what names this process as the one in charge."""
    return json.dumps({"nonce": secrets.token_hex(8), **asdict(Process.own())})


def is_over(owner: str) -> bool:
    """Return whether the process that an owner's token names has ended, for all that can be seen from here."""
    values = json.loads(owner)
    values.pop("nonce")
    process = Process(**values)
    return process.visible and not process.lives


def taken(store: str) -> ExchangeError:
    """Return what to say where another coordinator is in charge."""
    return ExchangeError(
        f"another coordinator of this job is in charge at {store}. One is enough; after its host was lost, another may "
        f"take charge {LEASE_S} s later."
    )


def take_charge(store: str, take: Callable[[], str | None], release: Callable[[str], None]) -> None:
    """Be in charge.

    Args:
        store: where, for messages.
        take: tries to; returns None when it did, else the token of who is in charge.
        release: forgets who has this token.

    Raises:
        ExchangeError: another coordinator is in charge.
    """
    until_s = time.monotonic() + _WAIT_S
    while (owner := take()) is not None:
        if is_over(owner):
            release(owner)
        elif time.monotonic() > until_s:
            raise taken(store)
        else:
            time.sleep(_RETRY_S)


def persisted(store: str, attempt: Callable[[], _T], errors: tuple[type[Exception], ...]) -> _T:
    """Return what an attempt returns, trying again while the store cannot be reached.

    Raises:
        ExchangeError: it could not be reached for a minute.
    """
    began_s = time.monotonic()
    told = False
    while True:
        try:
            return attempt()
        except errors as error:
            waited_s = time.monotonic() - began_s
            if waited_s > _PATIENCE_S:
                raise ExchangeError(
                    f"the store {store} could not be reached for {waited_s:.0f} s ({error}). Start it, then the "
                    "coordinator; the rest of the job waits."
                ) from error
            if not told:
                told = True
                _LOG.warning("the store %s cannot be reached (%s); it is tried again", store, error)
            time.sleep(_RETRY_S)


class Renewal:
    """Renews a lease until it is closed; what fails is tried again, and an append will notice if it was too late."""

    def __init__(self, renew: Callable[[], object], errors: tuple[type[Exception], ...]) -> None:
        self._renew, self._errors = renew, errors
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Renew no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LEASE_S / 4):
            try:
                self._renew()
            except self._errors as error:
                _LOG.warning("the coordinator's lease could not be renewed (%s)", error)
