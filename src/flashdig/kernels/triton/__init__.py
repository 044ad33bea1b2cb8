"""Portable attention in Triton: forward and backward, dense and packed, every score term."""
