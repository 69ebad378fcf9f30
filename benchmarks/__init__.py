"""Benchmarks; a package, so that another `benchmarks` among the installed ones cannot hide it."""
