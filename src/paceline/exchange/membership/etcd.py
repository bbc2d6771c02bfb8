"""Records in etcd, through its JSON gateway (version 3 of the API; etcd 3.4 or newer). No further package is needed.

    PREFIX/JOB/owner          the coordinator in charge, under a lease
    PREFIX/JOB/base           one record that stands for all up to a number
    PREFIX/JOB/records/N      what was appended since, in order

Each write holds on condition that the owner is who writes.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Sequence
from typing import Any, Final

from paceline.errors import ExchangeError
from paceline.exchange.membership import charge
from paceline.exchange.membership.store import Record

_ERRORS: Final = (OSError, http.client.HTTPException)
_PAGE: Final = 500
"""Records that are read at once."""


class Etcd:
    """The store of one job in etcd.

    Args:
        host, port: of an etcd server, or a proxy before several.
        prefix: of keys.
        job: name of the job among others with the same prefix.
    """

    def __init__(self, host: str, port: int, prefix: str, job: str) -> None:
        self._where = f"etcd://{host}:{port}/{prefix}"
        self._gateway, self._renewing = _Gateway(host, port), _Gateway(host, port)
        self._root = f"{prefix}/{job}/" if prefix else f"{job}/"
        self.token = charge.token()
        self._lease = ""
        self._renewal: charge.Renewal | None = None
        self._last = self._base = 0

    @property
    def appended(self) -> int:
        """See `Store`; batches, here."""
        return self._last - self._base

    def load(self) -> list[Record]:
        """See `Store`."""
        granted = self._ask("lease/grant", {"TTL": charge.LEASE_S})
        self._lease = granted["ID"]
        charge.take_charge(self._where, self._take, self.release)
        lease = {"ID": self._lease}
        self._renewal = charge.Renewal(lambda: self._renewing.ask("lease/keepalive", lease), _ERRORS)
        records: list[Record] = []
        base = self._ask("kv/range", {"key": self._key("base")}).get("kvs", [])
        if base:
            values = json.loads(base64.b64decode(base[0]["value"]))
            self._base = self._last = values["upto"]
            records.append(values["record"])
        while page := self._page(self._last + 1):
            for entry in page:
                records += json.loads(base64.b64decode(entry["value"]))
            self._last = int(base64.b64decode(page[-1]["key"]).rsplit(b"/", 1)[1])
        return records

    def append(self, records: Sequence[Record], durable: bool) -> None:
        """See `Store`; always durable."""
        key = self._key(_numbered(self._last + 1))
        self._write({"requestPut": {"key": key, "value": _coded(json.dumps(list(records)))}})
        self._last += 1

    def replace(self, record: Record) -> None:
        """See `Store`."""
        base = json.dumps({"upto": self._last, "record": record})
        past = {"key": self._key(_numbered(0)), "range_end": self._key(_numbered(self._last + 1))}
        self._write({"requestPut": {"key": self._key("base"), "value": _coded(base)}}, {"requestDeleteRange": past})
        self._base = self._last

    def close(self) -> None:
        """See `Store`."""
        if self._renewal is not None:
            self._renewal.close()
        if self._lease:
            with contextlib.suppress(*_ERRORS, ExchangeError):
                self._gateway.ask("lease/revoke", {"ID": self._lease})
        self._gateway.close()
        self._renewing.close()

    def _take(self) -> str | None:
        key = self._key("owner")
        free = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"requestPut": {"key": key, "value": _coded(self.token), "lease": self._lease}}
        look = {"requestRange": {"key": key}}
        answer = self._ask("kv/txn", {"compare": [free], "success": [put], "failure": [look]})
        if answer.get("succeeded"):
            return None
        found = answer["responses"][0]["response_range"].get("kvs", [])
        owner = base64.b64decode(found[0]["value"]).decode() if found else ""
        return None if owner == self.token else owner  # an attempt of which the answer was lost

    def release(self, owner: str) -> None:
        """Have nobody in charge, if it is this one."""
        key = self._key("owner")
        same = {"key": key, "target": "VALUE", "result": "EQUAL", "value": _coded(owner)}
        self._ask("kv/txn", {"compare": [same], "success": [{"requestDeleteRange": {"key": key}}]})

    def _page(self, first: int) -> list[dict[str, str]]:
        wanted = {"key": self._key(_numbered(first)), "range_end": self._key("records0"), "limit": _PAGE}
        kvs: list[dict[str, str]] = self._ask("kv/range", wanted).get("kvs", [])
        return kvs

    def _write(self, *operations: dict[str, Any]) -> None:
        mine = {"key": self._key("owner"), "target": "VALUE", "result": "EQUAL", "value": _coded(self.token)}
        answer = self._ask("kv/txn", {"compare": [mine], "success": list(operations)})
        if not answer.get("succeeded"):
            raise charge.taken(self._where)

    def _ask(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        return charge.persisted(self._where, lambda: self._gateway.ask(path, message), _ERRORS)

    def _key(self, name: str) -> str:
        return _coded(self._root + name)


class _Gateway:
    """One connection to the gateway; opened anew after errors. For one thread."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=5)

    def ask(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._connection.request("POST", f"/v3/{path}", json.dumps(message))
            response = self._connection.getresponse()
            text = response.read()
        except _ERRORS:
            self._connection.close()
            raise
        if response.status >= 500:
            raise http.client.HTTPException(f"{response.status}: {text[:200].decode(errors='replace')}")
        if response.status != 200:
            raise ExchangeError(f"etcd refused {path} ({response.status}): {text[:200].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        self._connection.close()


def _numbered(number: int) -> str:
    return f"records/{number:016d}"


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
