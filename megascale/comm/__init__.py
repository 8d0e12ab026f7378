"""Communication: every collective and point-to-point message of the package goes through this folder."""
