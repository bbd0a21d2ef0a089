"""Find the model to export and read it."""
