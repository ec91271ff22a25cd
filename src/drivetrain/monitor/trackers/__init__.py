"""One module for each tracker, named as it is; each has `prepare` (`monitor/tracking.py`)."""
