"""What each rank of a run will need of memory, from configuration and ``config.json`` alone."""
