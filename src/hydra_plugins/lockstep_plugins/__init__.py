"""Lockstep's own plugins for Hydra, which imports all modules of this package at every start: heavy imports come late."""
