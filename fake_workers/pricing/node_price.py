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


class DraftingPrice(ProfilePrice):
    """The same where every step ends with the drafting of the next tokens by a module of one layer (MTP).

    Verifying drafts costs their tokens in the dense and MoE parts; attention reads each request's KV once for all of
    them. The module runs once per draft token, over one token per request that decodes; a run is priced as one of the
    model's layers: the decode step of those requests divided by the layers.
    """

    def __init__(self, profile: StepProfile, drafts: int, layers: int) -> None:
        super().__init__(profile)
        self.drafts, self.layers = drafts, layers

    def step_ns(self, ranks: list[RankBatch]) -> int:
        """Duration of one step with its drafting, ns."""
        plain = [RankBatch((), r.decodes, r.decode_context_tokens) for r in ranks]
        drafting = step_ns(self.profile, plain) * self.drafts // self.layers
        return step_ns(self.profile, ranks) + drafting
