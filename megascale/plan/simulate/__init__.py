"""Step time: hardware and stack profiles, times of GEMMs, links and layers, and an event simulator."""
