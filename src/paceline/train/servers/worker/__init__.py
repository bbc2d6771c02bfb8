"""One worker: its replica of the module, its samples, and the loop that reads, computes and pushes."""
