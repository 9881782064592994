"""Checks at a stage's start: seconds spent to know that the engine and this model agree about the mathematics."""
