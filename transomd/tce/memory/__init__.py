"""The memory tier: a copy of the newest checkpoints in host memory that outlives the program."""
