"""What is produced to look at: recordings, offline compilation, interpreter counts."""
