"""Mixture of experts: each token is routed to a few experts, and their results are summed."""
