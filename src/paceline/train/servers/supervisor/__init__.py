"""The supervisor of a run: sets up, starts, replaces, and finishes."""
