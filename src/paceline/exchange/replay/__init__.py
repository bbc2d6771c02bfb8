"""A run once more, serially: the same worker loops, each read at the position that it had, updates in the order logged.

What comes out must be the run's last snapshot, bit for bit. It stands in the place of the servers and of whoever deals
tasks, and knows nothing of how a worker computes.
"""
