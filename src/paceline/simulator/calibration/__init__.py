"""What `paceline calibrate` does: probes on the ranks of a job, coefficients that explain them, and a cluster of it."""
