"""What a rank's parameters are of a Hugging Face checkpoint, and the way there and back."""
