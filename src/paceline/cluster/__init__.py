"""Clusters as data: devices, the levels of the network between them, and what work and collectives take on them.

Knows nothing of programs, placements or PyTorch: it answers for numbers, and for arrays of numbers at once.
"""
