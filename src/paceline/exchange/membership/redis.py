"""Records in Redis, as durable as that keeps them: `appendonly yes` and `appendfsync always` for a loss of power.

    paceline:JOB:owner     the coordinator in charge, for as long as its lease
    paceline:JOB:records   a list of batches
    paceline:JOB:last      number of the last batch, so that one that is sent again counts once

Each write is a script that first looks whether the owner is who writes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

from paceline.errors import ExchangeError
from paceline.exchange.membership import charge
from paceline.exchange.membership.store import Record

_LEASE_MS: Final = 1000 * charge.LEASE_S

_RENEW: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('pexpire', KEYS[1], ARGV[2])"""

_RELEASE: Final = """
if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"""

_APPEND: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('get', KEYS[3]) == ARGV[2] then return 1 end
redis.call('rpush', KEYS[2], ARGV[3])
redis.call('set', KEYS[3], ARGV[2])
return 1"""

_REPLACE: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('del', KEYS[2])
redis.call('rpush', KEYS[2], ARGV[3])
return 1"""


class Redis:
    """The store of one job in Redis.

    Args:
        url: `redis://host:port/db`, or what else the package `redis` reads (`rediss://`, passwords).
        job: name of the job among others in the same database.

    Raises:
        ExchangeError: the package `redis` is not installed.
    """

    def __init__(self, url: str, job: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise ExchangeError(
                f"the store {url} needs the package redis: pip install 'paceline[redis]', or use the embedded store."
            ) from error
        self._where = url
        self._errors: tuple[type[Exception], ...] = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)
        self._client: Any = redis.Redis.from_url(url, socket_timeout=5, decode_responses=True)
        self._keys = [f"paceline:{job}:{name}" for name in ("owner", "records", "last")]
        self.token = charge.token()
        self._renewal: charge.Renewal | None = None
        self._last = self._appended = 0

    @property
    def appended(self) -> int:
        """See `Store`; batches, here."""
        return self._appended

    def load(self) -> list[Record]:
        """See `Store`."""
        charge.take_charge(self._where, self._take, self.release)
        self._renewal = charge.Renewal(
            lambda: self._client.eval(_RENEW, 1, self._keys[0], self.token, _LEASE_MS), self._errors
        )
        batches = self._persisted(lambda: self._client.lrange(self._keys[1], 0, -1))
        self._last = int(self._persisted(lambda: self._client.get(self._keys[2])) or 0)
        self._appended = len(batches)
        return [record for batch in batches for record in json.loads(batch)]

    def append(self, records: Sequence[Record], durable: bool) -> None:
        """See `Store`."""
        self._write(_APPEND, str(self._last + 1), json.dumps(list(records)))
        self._last += 1
        self._appended += 1

    def replace(self, record: Record) -> None:
        """See `Store`."""
        self._write(_REPLACE, "", json.dumps([record]))
        self._appended = 1

    def close(self) -> None:
        """See `Store`."""
        if self._renewal is not None:
            self._renewal.close()
        with contextlib.suppress(*self._errors):
            self._client.eval(_RELEASE, 1, self._keys[0], self.token)
        self._client.close()

    def release(self, owner: str) -> None:
        """Have nobody in charge, if it is this one."""
        self._run(_RELEASE, owner)

    def _take(self) -> str | None:
        self._persisted(lambda: self._client.set(self._keys[0], self.token, nx=True, px=_LEASE_MS))
        owner: str | None = self._persisted(lambda: self._client.get(self._keys[0]))
        return None if owner == self.token else owner or self._take()

    def _write(self, script: str, number: str, text: str) -> None:
        if not self._run(script, self.token, number, text):
            raise charge.taken(self._where)

    def _run(self, script: str, *values: str) -> Any:
        return self._persisted(lambda: self._client.eval(script, 3, *self._keys, *values))

    def _persisted(self, attempt: Any) -> Any:
        return charge.persisted(self._where, attempt, self._errors)
