"""Between a worker and the servers: who is asked for what, what is asked again, and what a worker did, written down.

It knows views, layouts and frames; not what is computed from what it reads.
"""
