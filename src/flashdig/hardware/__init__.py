"""Facts about GPUs: devices and compute capabilities, with a source for each number."""
