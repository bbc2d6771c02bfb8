"""A step on many devices by representatives: one rank for each rank of a pipeline, at a cost that does not grow."""
