"""The search over plans: every layout of a workload on a cluster, what each takes, and why the best is the best.

Numbers come from the simulator; this room says what may be asked for, what the runtime can execute, and how to tell it.
"""
