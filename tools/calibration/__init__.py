"""Calibration of the planner: published measurements, and the fit of efficiencies to them."""
