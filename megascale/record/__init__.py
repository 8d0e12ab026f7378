"""The record of a rank: one log in shared memory, which the rank writes and others read without its help."""
