"""What is read: profiler files from anywhere, without GPU and without torch."""
