"""Once per batch: new weights to every endpoint, and proof of what each serves."""
