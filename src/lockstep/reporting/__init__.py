"""What a run says and leaves: console, loggers, report.json, report.html."""
