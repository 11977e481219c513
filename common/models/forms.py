"""Forms of matrices on a device: the one place that resolves `model.quantization` = auto. Needs no torch.

What stands below gets `Forms`, and never asks for a device.
"""

from typing import NamedTuple, Self

from common.models.reading import AS_STORED, PACKED
from common.models.sizes.codes import FLOATS, PAIRS, Codes
from common.settings.config import Config

Capability = tuple[int, int]
"""Compute capability of a GPU, such as (9, 0)."""
OLDEST: Capability = (8, 0)
"""Capability of the oldest GPUs that are served: what a GPU of unknown capability has at least."""
FAST: dict[str, Capability] = {PAIRS: OLDEST, FLOATS: (9, 0)}
"""Oldest GPUs on which few tokens are multiplied by codes in groups as fast as by 16 bits, by the dtype of codes."""
FAST_COLUMNS = 128
"""Least columns of a group of such codes. Smaller groups take twice the time beside 64 sequences, but on Hopper.

There they take 0.6 of the time of 16 bits for a sequence, as long for 8, and 1.25 times as long for 64.
"""
HOPPER = 9
"""Major number of the capability."""
IN_GROUPS = frozenset({PAIRS, FLOATS, "int8"})
"""Dtypes of all codes in groups."""


class Target(NamedTuple):
    """Processor that computes products, and the settings that it computes them by."""

    capability: Capability | None  # None: a CPU
    dtype: str = "auto"  # as `model.dtype`
    linear: str = "triton"  # as `kernels.linear`

    @classmethod
    def of(cls, config: Config, capability: Capability | None) -> Self:
        """Return a worker with these settings, on a GPU or, without a capability, on a CPU."""
        return cls(capability, config.model.dtype, config.kernels.linear)

    @property
    def label(self) -> str:
        """Return what the device is called in the log."""
        return "a CPU" if self.capability is None else f"a GPU of capability {'.'.join(map(str, self.capability))}"

    @property
    def obstacle(self) -> str:
        """Return why no kernel multiplies by codes in groups; "" where one does."""
        if self.capability is None:
            return "products with codes in groups take several times longer there"
        if self.linear != "triton":
            return f"kernels.linear = {self.linear} has no kernel for codes in groups"
        if self.dtype == "float32":
            return "no kernel multiplies by codes in groups in model.dtype = float32"
        return ""

    @property
    def fast(self) -> frozenset[str]:
        """Return the dtypes of codes in groups that are multiplied by as fast as 16 bits."""
        if self.capability is None or self.obstacle:
            return frozenset()
        return frozenset(dtype for dtype, oldest in FAST.items() if self.capability >= oldest)

    @property
    def fast_columns(self) -> int:
        """Return the least columns of a group of such codes."""
        return 0 if self.capability is not None and self.capability[0] == HOPPER else FAST_COLUMNS


class Forms(NamedTuple):
    """Codes of a checkpoint that stay in memory, and why no others do."""

    choice: str  # of `model.quantization`: AS_STORED, PACKED, PLAIN, or a scheme of quantization at load
    device: str  # in words
    bytes_stay: bool  # codes of 8 bits for inputs of 8 bits, and those of experts
    in_groups: frozenset[str]  # dtypes of codes in groups that stay packed
    reason: str = ""  # why no others stay, in words
    least_columns: int = 0  # of groups that stay

    def stays(self, form: Codes) -> bool:
        """Tell whether a matrix stays in a form that a checkpoint has it in."""
        if not form.is_weight_only:
            return self.bytes_stay
        return form.dtype in self.in_groups and form.columns >= self.least_columns


def forms_on(target: Target, choice: str) -> Forms:
    """Resolve a choice of `model.quantization` for a device.

    AS_STORED keeps codes in groups packed where decode steps of 8 sequences are as fast by them as by 16 bits.
    """
    if choice == PACKED:
        return Forms(choice, target.label, bytes_stay=True, in_groups=IN_GROUPS)
    if choice != AS_STORED:
        return Forms(choice, target.label, bytes_stay=False, in_groups=frozenset())
    reason = target.obstacle or "products with these take longer there than with 16 bits"
    least = target.fast_columns
    return Forms(choice, target.label, bytes_stay=True, in_groups=target.fast, reason=reason, least_columns=least)
