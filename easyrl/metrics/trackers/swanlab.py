"""Metrics in an experiment of SwanLab."""
