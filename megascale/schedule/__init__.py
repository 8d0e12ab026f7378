"""Pipeline schedules: pure functions that return the order of compute and communication as lists. No torch."""
