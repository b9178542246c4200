"""One method a file. Each only scores blocks; `depth.select` makes the plan."""
