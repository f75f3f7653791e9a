"""The fabric: directed links, flows that share them max-min fairly, what a transfer costs, and topologies as data."""
