"""Loaded last by the process from which tests fork: what is there by then is shared, and no collection copies it."""

import gc

gc.collect()
gc.freeze()
