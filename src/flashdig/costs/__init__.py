"""Analytic cost models: what attention must cost, from shapes and hardware facts alone (no torch, no GPU)."""
