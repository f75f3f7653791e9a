"""The cluster on the wall clock: simulated workers behind vLLM's API, the real router, Envoy, and a page."""
