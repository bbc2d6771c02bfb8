"""How the ranks of a job are started, find each other and end. Knows nothing of what they compute."""
