"""How long an engine step takes: profiles of measured kernel times, priced in whole nanoseconds."""
