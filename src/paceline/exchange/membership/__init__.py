"""Who is there, who holds what, and who computes what: the coordinator of a job and its members.

One coordinator makes every view (`views`), deals every task (`tasks`) and forgets nothing of it (`store`): it may be
killed and started again while the job goes on. Members hold a lease (`member`); who only looks is an `observer`.
Nothing here loads PyTorch.
"""

from __future__ import annotations

from paceline.exchange.membership.member import Fenced, Member, SnapshotRequest
from paceline.exchange.membership.observer import Observer
from paceline.exchange.membership.seats import Role

__all__ = ["Fenced", "Member", "Observer", "Role", "SnapshotRequest"]
