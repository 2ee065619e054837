"""Multiruns: their table, and the sweeper that Optuna steers."""
