"""Writing token datasets: from text, or from token files of other projects."""
