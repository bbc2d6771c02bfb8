"""The command line: a file per verb, each a thin skin over a function that Python users call too.

Strings become nouns here (`dp=2` a mesh, a path a recipe), errors become one message and an exit code. Nothing is
computed here, and nothing below is imported before its verb runs, so that `--help` answers at once.
"""
