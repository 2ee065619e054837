"""Multiruns: their table of results, and sweeps with Optuna."""
