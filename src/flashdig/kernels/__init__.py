"""What users run: device code and its launchers, and the two plain-torch definitions of the semantics."""
