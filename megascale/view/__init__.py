"""What people look at: the model of a run that its terminal, report and web page share, and their drawings."""
