"""A step in closed form: what it takes, and what a rank holds, for tens of thousands of layouts at once."""
