"""Published experiments with prefill and decode on different workers, next to their figures."""
