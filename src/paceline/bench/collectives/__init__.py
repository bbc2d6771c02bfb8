"""`paceline bench collectives`: exchanges measured, and beside them what was published."""
