"""What a run tells while it goes on: steps, curves, members and their figures."""
