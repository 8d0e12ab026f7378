"""Layouts of a model on a cluster: which are legal, which fit, which are fastest, and how a plan is reported."""
