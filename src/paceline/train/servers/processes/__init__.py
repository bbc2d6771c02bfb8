"""Processes of a run: forked from one that has loaded PyTorch, each with a log, none outlives who started it."""
