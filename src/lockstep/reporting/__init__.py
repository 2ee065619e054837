"""A run's output: console, loggers, report.json."""
