"""Keeps which ways there are for KV blocks from prefill to decode workers, as the latter have tried them."""

from collections.abc import Callable, Collection, Iterator, Set

from common.wire.messages.operator import MAX_WORKERS
from common.wire.messages.worker import KVPathReport, Role
from router.placement.member import Member

Identity = tuple[str, int]
"""Id and epoch of a worker."""


class KVPaths:
    """Reports of registered decode workers, of prefill workers too that are not registered yet.

    After a restart of the router either of the two may come first.

    Args:
        get: that very incarnation, if it is registered.
    """

    def __init__(self, get: Callable[[str, int], Member | None]) -> None:
        self._get = get
        self._reports: dict[Identity, dict[Identity, KVPathReport]] = {}  # by prefill worker, by decode worker
        self._partners: dict[Member, set[Member]] = {}  # of each that is registered: those with a proven path
        self._failed: dict[tuple[Identity, Identity], KVPathReport] = {}  # between those that are registered

    def __iter__(self) -> Iterator[KVPathReport]:
        """What was said of prefill workers that are registered."""
        for identity, reports in self._reports.items():
            if self._get(*identity):
                yield from reports.values()

    @property
    def failed(self) -> Collection[KVPathReport]:
        """Those paths between registered workers that do not work."""
        return self._failed.values()

    def join(self, worker: Member) -> None:
        """Count what was said of a worker before it was registered."""
        self._partners[worker] = set()
        for report in self._reports.get((worker.id, worker.epoch), {}).values():
            self._link(report)

    def leave(self, worker: Member) -> None:
        """Forget a worker, what it said and what others said of it."""
        for partner in self._partners.pop(worker, set()):
            self._partners[partner].discard(worker)
        identity = worker.id, worker.epoch
        self._failed = {pair: report for pair, report in self._failed.items() if identity not in pair}
        self._reports.pop(identity, None)
        if worker.ready.role is Role.DECODE:
            for reports in self._reports.values():
                reports.pop(identity, None)
            self._reports = {prefill: reports for prefill, reports in self._reports.items() if reports}

    def note(self, report: KVPathReport) -> bool:
        """False when it says what was said before, or names more unknown prefill workers than there may be."""
        prefill, decode = (report.prefill_worker_id, report.prefill_epoch), (report.worker_id, report.epoch)
        if prefill not in self._reports and not self._get(*prefill) and self._num_unknown(decode) >= MAX_WORKERS:
            return False
        reports = self._reports.setdefault(prefill, {})
        if reports.get(decode) == report:
            return False
        reports[decode] = report
        self._link(report)
        return True

    def find(self, prefill: Member, decode: Member) -> KVPathReport | None:
        """What was said of the way between these."""
        return self._reports.get((prefill.id, prefill.epoch), {}).get((decode.id, decode.epoch))

    def partners(self, worker: Member) -> Set[Member]:
        """Of the other role, those that are registered and to or from which its path is proven."""
        return self._partners.get(worker, set())

    def is_proven(self, prefill: Member, decode: Member) -> bool:
        return decode in self.partners(prefill)

    def _num_unknown(self, decode: Identity) -> int:
        """Prefill workers that are not registered, of which this one has told."""
        return sum(decode in reports and not self._get(*prefill) for prefill, reports in self._reports.items())

    def _link(self, report: KVPathReport) -> None:
        prefill = self._get(report.prefill_worker_id, report.prefill_epoch)
        decode = self._get(report.worker_id, report.epoch)
        if prefill is None or decode is None:
            return
        pair = (prefill.id, prefill.epoch), (decode.id, decode.epoch)
        if report.error:
            self._failed[pair] = report
        else:
            self._failed.pop(pair, None)
        for worker, partner in ((prefill, decode), (decode, prefill)):
            if report.error:
                self._partners[worker].discard(partner)
            else:
                self._partners[worker].add(partner)
