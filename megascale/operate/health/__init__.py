"""Health of hosts, devices and links: checks, comparison of nodes, metrics of hosts. No torch."""
