"""Cache tiers below the GPU: the real LMCache on the virtual clock, every byte through the fabric."""
