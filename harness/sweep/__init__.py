"""Many runs of one experiment: grids over its fields, and the search for the highest load that meets an SLO."""
