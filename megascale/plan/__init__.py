"""The cost of a job before its start: account (FLOPs, memory, bytes), simulate, search, dry run."""
