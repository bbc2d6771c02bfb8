"""Programs: a training step captured once from the user's own module as a pure function.

Parameters, buffers and a batch go in; loss, gradients and new buffers come out. This room knows nothing of meshes,
placements or processes.
"""
