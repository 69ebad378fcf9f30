"""Tables and plots of what is public: routing on a public corpus, epsilon over cycles."""

from raptor_hf.analysis.plots import plot_routing_table

__all__ = ["plot_routing_table"]
