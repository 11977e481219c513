"""What a prompt begins with, as far as that is known where it waits and is computed."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Beginning:
    """Of one prompt; `PromptPrefixes` keeps it."""

    root: bytes = b""  # where its digests begin; b"" if none of its blocks is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # of its full blocks
    num_sealed: int = 0  # of those, from the first on: found, or computed
    found: list[int] = field(default_factory=list)  # blocks of its first tokens that it reads, until it is admitted
    looks_again: bool = False  # it has let go of what was found, or more is in host memory
    num_hoped: int = 0  # blocks that it finds then, perhaps
    has_given: bool = False  # it has given blocks back for those
    asks_again: bool = False  # more of it was sealed since it asked

    @property
    def next_digest(self) -> bytes:
        """Of the first full block that is not sealed; b"" when all are."""
        return self.digests[self.num_sealed] if self.num_sealed < len(self.digests) else b""

    @property
    def last_digest(self) -> bytes:
        """Of the last full block, or where the chain begins; b"" if nothing is to be sealed."""
        return self.digests[-1] if self.digests else self.root
