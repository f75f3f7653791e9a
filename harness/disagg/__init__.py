"""Prefill and decode on different workers: pools, the sidecar's part, KV that moves between them."""
