"""`paceline bench server`, part by part."""
