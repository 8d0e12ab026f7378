"""Ranks talk: the one door through which every collective and every message goes."""
