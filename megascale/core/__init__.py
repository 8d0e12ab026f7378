"""Names every layer shares: errors, choices, units, and who this process is. Standard library only."""
