"""What is known of a prompt's first tokens while it waits and is computed."""

from dataclasses import dataclass, field

from common.memory.magazine import Grant


@dataclass(slots=True)
class Beginning:
    """The chain of keys of one prompt, and its blocks until it is admitted; `PromptPrefixes` keeps it."""

    root: bytes = b""  # where its digests begin; b"" if none of its blocks is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # of its full blocks
    num_sealed: int = 0  # of those, from the first on: found, or computed
    grant: Grant | None = None  # all of its blocks, until it is admitted
    is_outdated: bool = False  # more of it was sealed since its blocks were asked for
    is_filling: bool = False  # some blocks of the grant are lent, to be filled from another pool

    @property
    def next_digest(self) -> bytes:
        """The first full block that is not sealed; b"" when all are."""
        return self.digests[self.num_sealed] if self.num_sealed < len(self.digests) else b""

    @property
    def last_digest(self) -> bytes:
        """The last full block, or where the chain begins; b"" if nothing is to be sealed."""
        return self.digests[-1] if self.digests else self.root

    @property
    def granted(self) -> list[int]:
        """Blocks of the grant, but for those that are lent."""
        return [] if self.grant is None else [*self.grant.found, *self.grant.fresh]
