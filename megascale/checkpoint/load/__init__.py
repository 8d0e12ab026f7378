"""Loading: find the newest intact checkpoint, then read the bytes that this rank's layout needs."""
