"""Weights from and for other projects."""
