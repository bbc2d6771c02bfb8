"""`paceline bench steps`: predicted beside measured steps on this machine."""
