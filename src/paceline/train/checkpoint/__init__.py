"""Checkpoints: saved in the background by shard, restored bit for bit or at any other mesh, exported as safetensors.

This room knows pieces of tensors, files and ranks; nothing of programs, placements or data. There is no pickle in it.
"""

from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.directory import latest
from paceline.train.checkpoint.pieces import ShardedModule, ShardLike
from paceline.train.checkpoint.portable import export_checkpoint, export_safetensors, load_safetensors

__all__ = [
    "Checkpointer",
    "ShardLike",
    "ShardedModule",
    "export_checkpoint",
    "export_safetensors",
    "latest",
    "load_safetensors",
]
