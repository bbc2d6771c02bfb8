"""A server process: holds shards, answers reads, applies updates and hands them on along the chain of each shard.

`entry.py` is an update as servers tell each other of it; `place.py` says from a view where in its chains a server
stands; `replica.py` is one shard in its chain: what its successor has not acknowledged, and what is committed;
`keeper.py` has all replicas of a server under one lock: `standing.py` is what it holds and of what it may answer,
`applying.py` applies updates and hands them on, `answering.py` answers reads. Around it: `peer.py` (a thread for each
connection that comes in), `link.py` (to each successor), `copies.py` (a shard on its way to a new replica),
`snapshots.py`, `figures.py` and `life.py`, from joining to leaving. It asks `membership` who holds what, and decides
nothing of it.
"""
