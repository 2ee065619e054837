"""From a command line to a checked config with a run name, without torch."""
