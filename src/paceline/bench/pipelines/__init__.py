"""`paceline bench pipelines`: schedules against their peers, and against what is possible."""
