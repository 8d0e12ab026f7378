"""Many devices compute one thing."""
