"""The exhibits: every generation of attention as a small, frozen, runnable file, and the ladder that orders them."""
