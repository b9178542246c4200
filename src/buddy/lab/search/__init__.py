"""The search of the best set of blocks at each depth, for the policy `searched`."""
