"""Registry of KV paths from prefill to decode workers, as reported by the decode workers."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set

from common.wire.messages.operator import MAX_WORKERS
from common.wire.messages.worker import KVPathReport, Role
from router.placement.member import NO_TRANSPORT, Member

Identity = tuple[str, int]
"""Id and epoch of a worker."""


class KVPaths:
    """Path reports of registered decode workers, also about prefill workers not registered yet.

    Either side may register first after a restart of the router.

    Args:
        get: returns the registered worker with an id and epoch, or None.
    """

    def __init__(self, get: Callable[[str, int], Member | None]) -> None:
        self._get = get
        self._reports: dict[Identity, dict[Identity, KVPathReport]] = {}  # by prefill worker, by decode worker
        self._partners: dict[Member, set[Member]] = {}  # registered workers only
        self._by_rate: dict[Member, dict[float, set[Member]]] = {}  # by decode worker
        self._failed: dict[tuple[Identity, Identity], KVPathReport] = {}  # prefill, decode; both registered

    def __iter__(self) -> Iterator[KVPathReport]:
        """Yield reports about registered prefill workers."""
        for identity, reports in self._reports.items():
            if self._get(*identity):
                yield from reports.values()

    @property
    def failed(self) -> Collection[KVPathReport]:
        """Reports of failed paths between registered workers."""
        return self._failed.values()

    def add_worker(self, worker: Member) -> None:
        """Apply reports received about a worker before its registration."""
        self._partners[worker] = set()
        if worker.ready.role is Role.DECODE:
            self._by_rate[worker] = {}
        for report in self._reports.get((worker.id, worker.epoch), {}).values():
            self._link(report)

    def remove_worker(self, worker: Member) -> None:
        """Forget a worker, its reports, and reports about its paths."""
        for partner in self._partners.pop(worker, set()):
            self._partners[partner].discard(worker)
            self._sort(worker, partner, None)
        self._by_rate.pop(worker, None)
        identity = worker.id, worker.epoch
        self._failed = {pair: report for pair, report in self._failed.items() if identity not in pair}
        self._reports.pop(identity, None)
        if worker.ready.role is Role.DECODE:
            for reports in self._reports.values():
                reports.pop(identity, None)
            self._reports = {prefill: reports for prefill, reports in self._reports.items() if reports}

    def receive(self, report: KVPathReport) -> bool:
        """Store a report; return False if nothing is new or a decode worker names too many unknown prefill workers."""
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
        """Return the report about the path between two workers, None before the first report."""
        return self._reports.get((prefill.id, prefill.epoch), {}).get((decode.id, decode.epoch))

    def num_tried(self, prefills: Iterable[Member], decodes: Iterable[Member]) -> int:
        """Count the paths with a report from some prefill workers to some decode workers."""
        identities = {(decode.id, decode.epoch) for decode in decodes}
        tried = (self._reports.get((prefill.id, prefill.epoch), {}).keys() for prefill in prefills)
        return sum(len(identities & some) for some in tried if some)

    def transport(self, prefill: Member, decode: Member) -> str:
        """Return the transport of KV blocks between two workers, "none" for a worker that does both."""
        report = self.find(prefill, decode)
        return NO_TRANSPORT if report is None else report.transport

    def partners(self, worker: Member) -> Set[Member]:
        """Return registered workers of the other role with a proven path to or from `worker`."""
        return self._partners.get(worker, set())

    def rate(self, prefill: Member, decode: Member) -> float:
        """Return GB/s between two workers as their proof measured, 0 if unknown or if nothing has to be copied.

        It is the nearest power of two: proofs vary, and workers that are alike should take turns.
        """
        report = self.find(prefill, decode)
        return 0.0 if report is None else _rounded(report.gb_per_s)

    def by_rate(self, decode: Member) -> Mapping[float, Set[Member]]:
        """Return prefill workers of other pools with a proven path to a decode worker, by `rate`."""
        return self._by_rate.get(decode, {})

    def count(self, prefills: Collection[Member], decodes: Collection[Member]) -> int:
        """Count the proven paths from some prefill workers to some decode workers."""
        num_from = sum(map(len, map(self._partners.__getitem__, prefills)))
        if len(decodes) == len(self._by_rate):  # all
            return num_from
        among, others = set(prefills), self._by_rate.keys() - decodes
        if len(others) > len(decodes):
            return sum(len(among & self.partners(decode)) for decode in decodes)
        return num_from - sum(len(among & self.partners(decode)) for decode in others)

    def is_proven(self, prefill: Member, decode: Member) -> bool:
        return decode in self.partners(prefill)

    def _num_unknown(self, decode: Identity) -> int:
        """Count unregistered prefill workers reported by a decode worker."""
        return sum(decode in reports and not self._get(*prefill) for prefill, reports in self._reports.items())

    def _link(self, report: KVPathReport) -> None:
        prefill = self._get(report.prefill_worker_id, report.prefill_epoch)
        decode = self._get(report.worker_id, report.epoch)
        if prefill is None or decode is None or prefill.ready.role is not Role.PREFILL:
            return
        pair = (prefill.id, prefill.epoch), (decode.id, decode.epoch)
        if report.error:
            self._failed[pair] = report
            self._partners[prefill].discard(decode)
            self._partners[decode].discard(prefill)
            self._sort(prefill, decode, None)
        else:
            self._failed.pop(pair, None)
            self._partners[prefill].add(decode)
            self._partners[decode].add(prefill)
            self._sort(prefill, decode, _rounded(report.gb_per_s))

    def _sort(self, prefill: Member, decode: Member, rate: float | None) -> None:
        """Put a prefill worker under its rate to a decode worker of another pool; None takes it out."""
        rates = self._by_rate.get(decode, {})
        for each, members in list(rates.items()):
            members.discard(prefill)
            if not members:
                del rates[each]
        if rate is not None and prefill.pool != decode.pool:
            rates.setdefault(rate, set()).add(prefill)


def _rounded(gb_per_s: float) -> float:
    return 2.0 ** round(math.log2(gb_per_s)) if gb_per_s else 0.0
