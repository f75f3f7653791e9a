"""A visible correction of the raw tables, set by the experiment and reported with the results.

The tables price kernels. What a real engine adds on top (launch gaps, scheduling that is not overlapped,
sampling) differs per model, GPU and engine version and can be fitted to measured times. Nothing here is on by
default.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Calibration:
    """Multiplies table prices by exact rationals and adds whole nanoseconds: all prices stay integers.

    scale_prefill   applied to context attention and to the dense and MoE parts of steps with prefill tokens
    scale_decode    applied to decode attention and to the dense and MoE parts of steps that only decode
    per_step_ns     added once to every step of a node that is not empty
    per_seq_ns      added per scheduled request, within its rank (so a node pays that of its slowest rank)
    """

    scale_prefill: Fraction = Fraction(1)
    scale_decode: Fraction = Fraction(1)
    per_step_ns: int = 0
    per_seq_ns: int = 0

    def __post_init__(self) -> None:
        if self.scale_prefill <= 0 or self.scale_decode <= 0:
            raise ValueError("a calibration scale must be positive")
        if self.per_step_ns < 0 or self.per_seq_ns < 0:
            raise ValueError("a calibration overhead must not be negative")

    @classmethod
    def of(
        cls,
        scale_prefill: float | str = 1,
        scale_decode: float | str = 1,
        per_step_ns: int = 0,
        per_seq_ns: int = 0,
    ) -> Calibration:
        """From numbers as a user writes them: 1.12 means 112/100, not the nearest binary fraction."""
        return cls(Fraction(str(scale_prefill)), Fraction(str(scale_decode)), per_step_ns, per_seq_ns)

    def prefill(self, price_ns: int) -> int:
        """Scaled price of a prefill part, rounded down to whole nanoseconds."""
        return price_ns * self.scale_prefill.numerator // self.scale_prefill.denominator

    def decode(self, price_ns: int) -> int:
        """Scaled price of a decode part, rounded down to whole nanoseconds."""
        return price_ns * self.scale_decode.numerator // self.scale_decode.denominator

    def as_dict(self) -> dict[str, str | int]:
        """For the run's record."""
        return {
            "scale_prefill": str(self.scale_prefill),
            "scale_decode": str(self.scale_decode),
            "per_step_ns": self.per_step_ns,
            "per_seq_ns": self.per_seq_ns,
        }


RAW = Calibration()
