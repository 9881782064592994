"""Loops in C for what matrix products do slowly; compiled where they run, never required."""
