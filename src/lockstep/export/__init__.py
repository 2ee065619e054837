"""A trained network as a folder that needs neither Lockstep nor Lightning nor Hydra."""
