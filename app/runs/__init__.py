"""Runs: launching, control, state."""
