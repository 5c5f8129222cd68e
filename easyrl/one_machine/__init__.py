"""A whole run on one machine: its servers, its training processes, and the end of all of them."""
