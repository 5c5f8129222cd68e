"""What ``benchmarks.first_hour`` starts: good runs, and runs with a mistake that new users make."""
