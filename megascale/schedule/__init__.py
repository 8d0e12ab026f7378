"""In which order a pipeline computes and communicates: pure functions that return lists. No torch."""
