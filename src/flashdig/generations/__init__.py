"""The exhibits: each generation of attention as a small runnable file, and their ladder."""
