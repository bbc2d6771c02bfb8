"""`paceline bench scaling`: how this machine scales, and the laws that say so."""
