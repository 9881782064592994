"""Measurements and recordings that take longer than a test may. Each module says how it is run."""
