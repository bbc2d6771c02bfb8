"""Hogwild (Recht et al. 2011): workers of one host update the same memory without locks; there are no servers."""
