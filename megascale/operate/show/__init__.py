"""The views of a run: one model of its folder, which terminal, report and web page share, and their drawings."""
