"""The directory of a job's exchange, within that of its run: what is where.

    charter.json         what every process of the job is started with (`terms.Charter`)
    secret               shared by the processes of the job; readable by its owner only
    journal/             what the embedded coordinator must not forget
    events.jsonl         who came and went, and each view, as the coordinator made them
    updates/server-N.log what server N applied, in order (`shard.log`)
    actions/worker-N.jsonl  what worker N read, computed and pushed (`client.actions`)
    codec.json           what gradients are compressed by, where the first worker chose
    snapshots/N/         snapshot N; 0 is what the job began with
    sockets/             Unix sockets of servers on this host

Servers that do not share a file system keep theirs, and bring snapshots together by other means.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from paceline.durable import settle
from paceline.errors import ExchangeError
from paceline.exchange.terms import Charter


@dataclass(frozen=True)
class Directory:
    """Paths of an exchange."""

    root: Path

    @property
    def charter(self) -> Path:
        """See `terms.Charter`."""
        return self.root / "charter.json"

    @property
    def secret(self) -> Path:
        """Shared by the processes of a job."""
        return self.root / "secret"

    @property
    def journal(self) -> Path:
        """What the embedded coordinator must not forget."""
        return self.root / "journal"

    @property
    def events(self) -> Path:
        """Who came and went, and each view, a line of JSON each."""
        return self.root / "events.jsonl"

    @property
    def codec(self) -> Path:
        """What gradients are compressed by, where the first worker of the run chose."""
        return self.root / "codec.json"

    @property
    def snapshots(self) -> Path:
        """Directory of snapshots."""
        return self.root / "snapshots"

    @property
    def memory(self) -> Path:
        """What Hogwild's workers share, where there are no servers (`hogwild.memory`)."""
        return self.root / "memory"

    @property
    def sockets(self) -> Path:
        """Unix sockets of servers."""
        return self.root / "sockets"

    def snapshot(self, number: int) -> Path:
        """A snapshot."""
        return self.snapshots / str(number)

    def updates(self, server: int) -> Path:
        """What a server applied."""
        return self.root / "updates" / f"server-{server}.log"

    def actions(self, worker: int) -> Path:
        """What a worker did."""
        return self.root / "actions" / f"worker-{worker}.jsonl"

    def write(self, charter: Charter) -> None:
        """Make the directory, its secret and its charter; they outlive a loss of power."""
        for path in (self.root, self.snapshots, self.journal, self.root / "updates", self.root / "actions"):
            path.mkdir(parents=True, exist_ok=True)
        if not self.secret.exists():
            file = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w", encoding="ascii") as out:
                out.write(secrets.token_hex(32))
                out.flush()
                os.fsync(file)
        draft = self.charter.with_suffix(f".{os.getpid()}")
        with draft.open("w", encoding="utf-8") as out:
            json.dump(charter.to_dict(), out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self.charter)
        settle(self.root)
        settle(self.root.parent)

    def read(self) -> Charter:
        """Read the charter.

        Raises:
            ExchangeError: there is none here, or it cannot be read.
        """
        try:
            return Charter.from_dict(json.loads(self.charter.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ExchangeError(f"there is no job in {self.root}: it has no {self.charter.name}.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ExchangeError(f"cannot read {self.charter}: {error}") from error

    def read_secret(self) -> bytes:
        """Return what the processes of the job share: the variable PACELINE_SECRET if set, else the file.

        Raises:
            ExchangeError: there is neither.
        """
        given = os.environ.get("PACELINE_SECRET")
        if given:
            return given.encode()
        try:
            return self.secret.read_bytes()
        except OSError as error:
            raise ExchangeError(
                f"cannot read the job's secret, {self.secret} ({error.strerror}); it is in the run's directory, or set "
                "PACELINE_SECRET to its text."
            ) from error
