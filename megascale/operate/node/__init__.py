"""A node of a job: starts or finds the ranks of a host, watches and ends them, reports. No torch."""
