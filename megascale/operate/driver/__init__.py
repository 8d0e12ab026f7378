"""The driver of a job: state machine, policy, incidents, schedulers. No torch."""
