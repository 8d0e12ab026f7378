"""The process of a host that reads samples for all ranks there, and the memory shared with them."""
