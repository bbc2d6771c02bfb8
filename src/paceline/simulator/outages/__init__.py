"""Jobs that fail: how much of some weeks advances them, by simulation and by formulas."""
