"""Groups of workers with servers of their own, under global ones: how they meet, and how such a run goes on.

meeting.py   what a meeting moves, as numbers and as a file
ledger.py    which meetings a group has had, in its directory
bridge.py    how they meet
process.py   the process that carries it out, and again where one before it died
offline.py   meetings carried into snapshots, where servers are gone
cuts.py      from which snapshots of all exchanges together a run can go on
"""
