"""What ``benchmarks.gateway`` is made of: a scripted server, a client, windows of both ways."""
