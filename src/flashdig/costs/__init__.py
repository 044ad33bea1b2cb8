"""Cost models: what attention must cost, from shapes and hardware facts (no torch, no GPU)."""
