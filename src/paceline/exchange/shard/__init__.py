"""A shard: what is kept of all tables for some of the keys, as a function of the updates applied to it, in order.

`shard.py` is that function; `clocks.py` knows which tasks were applied, `sequences.py` which pushes, `pieces.py` holds
the parts of a synchronous step until all are there, `norms.py` knows by what it is clipped. `log.py` writes
down the order, `snapshot.py` what has become of it. No sockets, threads or clocks on the wall: replicas and replays
agree bit for bit.
"""
