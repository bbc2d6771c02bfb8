"""Placement: where each tensor of a program lives on a mesh, found by rules and a solver, made real by lowering.

This room knows programs and plans. It knows nothing of processes, process groups or training loops.
"""
