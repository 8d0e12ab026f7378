"""The verdict about a job that makes no progress, from the flight records of its ranks."""
