"""Reading what runs wrote down; never imported by training."""
