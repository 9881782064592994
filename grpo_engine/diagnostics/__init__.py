"""Metric catalogue, early stopping and detectors. Torch-free."""
