"""What the paper says about utility: formulas (`theory`), measurements and plots of them.

Measurements on private records are private (`raptor_hf.analysis.diagnostics`); those on a public corpus are public.
"""

from raptor_hf.analysis.plots import plot_routing_table

__all__ = ["plot_routing_table"]
