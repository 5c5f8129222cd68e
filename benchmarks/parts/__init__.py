"""What the commands beside this folder are made of: a folder per command, and what they share."""
