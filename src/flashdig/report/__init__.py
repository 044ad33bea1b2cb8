"""What a person sees: terminal tables and offline pages."""
