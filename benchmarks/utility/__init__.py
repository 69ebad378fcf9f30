"""Accuracy of every method at every budget, over seeds: `python -m benchmarks.utility`; see README.md here."""
