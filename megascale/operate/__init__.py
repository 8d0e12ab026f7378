"""The job and its people: starting ranks, driving a job through faults, health, records, diagnosis, views. No torch."""
