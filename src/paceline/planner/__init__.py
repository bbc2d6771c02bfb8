"""What a plan amounts to, told in the names of the user's modules. The search over plans will live here too.

Reads programs and steps; starts no ranks and knows nothing of recipes or the command line.
"""
