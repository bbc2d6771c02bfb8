"""Passes from a placed program to the two graphs that run: recomputation, partition, collectives and their order."""
