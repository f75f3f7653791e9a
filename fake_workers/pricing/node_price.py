"""A profile as the node's step loop wants it."""

from __future__ import annotations

from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.steps import DecodeLeap, RankBatch, step_ns


class ProfilePrice:
    """Prices steps and leaps of one lock-step group from one profile."""

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile

    def step_ns(self, ranks: list[RankBatch]) -> int:
        """Duration of one step, ns."""
        return step_ns(self.profile, ranks)

    def leap(self, ranks: list[RankBatch]) -> DecodeLeap:
        """The decode steps that start with `ranks`."""
        return DecodeLeap(self.profile, ranks)
