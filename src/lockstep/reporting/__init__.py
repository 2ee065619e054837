"""A run's output: console, loggers, report.json, report.html."""
