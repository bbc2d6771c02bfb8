"""Pipelines: each rank walks its list of a schedule with the graphs of its stages."""
