"""The demo with a tool: products of numbers that only a calculator gets right."""
