"""The queues between the four modules and the loops that drive them. Knows types and protocols only."""
