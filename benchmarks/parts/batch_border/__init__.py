"""What ``benchmarks.batch_border`` is made of."""
