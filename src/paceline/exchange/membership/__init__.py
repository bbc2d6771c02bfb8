"""Who is there, who holds what, and who computes what: the coordinator of a job and its members.

One coordinator makes every view (`views`), deals every task (`tasks`) and forgets nothing of it (`store`): it may be
killed and started again while the job goes on. Members hold a lease. Nothing here loads PyTorch.
"""
