"""Roofline: the batch at which a decode step turns from memory-bound to compute-bound.

Reads and arithmetic overlap perfectly at the data sheet's rates, so the times are lower bounds, not
forecasts (see `step_time`). Source: Pope et al. 2022, arXiv:2211.05102.
"""

from dataclasses import dataclass

FLOP_PER_PARAMETER = 2  # one multiplication and one addition


@dataclass(frozen=True, slots=True)
class Roofline:
    """One device of a copy while it decodes: its peaks, and what a step takes there.

    weight_bytes, sequence_bytes  read by each step, and for each sequence in it
    flop_per_token                two for each active parameter
    expert_share, unread_share    routed experts' share of the weights; n sequences leave
                                  unread_share ** n of them unread
    """

    peak_flop_per_s: float
    bandwidth_bytes_per_s: float
    weight_bytes: float
    sequence_bytes: float
    flop_per_token: float
    expert_share: float = 0.0
    unread_share: float = 0.0

    def flop_per_byte(self, batch: float) -> float:
        """Arithmetic intensity of a step of that many sequences."""
        read_share = 1.0 - self.expert_share * float(self.unread_share**batch)
        read_bytes = self.weight_bytes * read_share + self.sequence_bytes * batch
        return self.flop_per_token * batch / read_bytes

    @property
    def ops_per_byte(self) -> float:
        """Operations in the time that a byte takes. A10G: 70e12 / 600e9 = 116.7."""
        return self.peak_flop_per_s / self.bandwidth_bytes_per_s

    @property
    def critical_batch(self) -> float | None:
        """B*(L), at which arithmetic takes as long as reading weights and cache; None: none does.

        B*(L) = (W / BW) / (2 P / F - L k / BW): each sequence adds 2 P FLOP and L k bytes of cache.
        B*(0) = (bytes per weight / 2) * F / BW; 16 bits: 116.7 on A10G, 200.6 on A100 40 GB.
        """
        weights_s = self.weight_bytes / self.bandwidth_bytes_per_s
        compute_s = self.flop_per_token / self.peak_flop_per_s
        cache_s = self.sequence_bytes / self.bandwidth_bytes_per_s
        return None if compute_s <= cache_s else weights_s / (compute_s - cache_s)
