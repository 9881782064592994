"""Measuring a policy on prompts it was never trained on."""
