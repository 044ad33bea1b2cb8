"""What users run: device code with its launchers, and the semantics in plain torch."""
