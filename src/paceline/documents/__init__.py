"""YAML documents that users write: values that remember where they were written, and what models refuse, in words.

Knows nothing of what a document means; recipes and clusters are models over it.
"""
