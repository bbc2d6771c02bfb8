"""Between replicas: parameters on servers that everyone can see.

Replicas pull what they need, compute, and push; servers apply what is pushed. What the room promises: every key has one
master in every epoch, an acknowledged update is on all replicas of its shard and counts once, the order of updates is
logged and can be replayed bit for bit. The nouns are here: a `Job` (`job.py`), where keys live (`layout.py`), updates
(`updates.py`), who is there (`view.py`), what workers see of it (`interface.py`), what is sent (`messages.py`).
The rooms: `wire`, `table`, `compress`, `membership`, `shard`, `server`, `client`, `replay`, `hogwild`. It knows
tensors, and nothing of programs, recipes or training.
"""
