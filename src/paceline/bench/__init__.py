"""Benchmarks: what `paceline bench` runs. They know every room below; nothing knows them."""
