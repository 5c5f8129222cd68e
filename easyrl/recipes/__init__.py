"""The policy-gradient objective: advantages of a group, loss sums of a micro-batch."""
