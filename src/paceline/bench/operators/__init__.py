"""`paceline bench operators`: split operators against their peers."""
