"""Lockstep's plugins for Hydra, which imports all modules of this package at every start, so heavy imports come late."""
