"""What operators ask of a router, over the wire: how busy everybody is; and role changes, which they tell."""

import asyncio
import urllib.request

from common.wire.messages import Role
from common.wire.operator_messages import LoadReport, LoadWanted, RoleChange, Stage
from deploy.operator import dialed
from tests.router.conftest import Cluster

WHY = "prefill-1 on cuda:1 becomes decode-2: prompts keep 0.4 of 2 prefill workers busy"


async def asked(cluster: Cluster) -> LoadReport:
    def ask() -> LoadReport | None:
        with dialed(cluster.net) as operator:
            return operator.ask(LoadWanted, LoadReport, 60.0)

    report = await asyncio.to_thread(ask)
    assert report is not None
    return report


async def test_an_operator_hears_how_busy_everybody_is(cluster: Cluster) -> None:
    cluster.decode("decode-standby-0", standby=1)
    pool = cluster.service.pool
    await cluster.until(lambda: len(pool.paths) == 2 and all(worker.beat for worker in pool), "all are there")
    decode = pool.find("decode-0")
    assert decode is not None and decode.beat is not None
    report = await asked(cluster)
    loads = {load.name: load for load in report.workers}
    assert report.num_queued == 0
    assert {name: (load.role, load.is_serving, load.num_partners) for name, load in loads.items()} == {
        "prefill-0": (Role.PREFILL, True, 2),
        "decode-0": (Role.DECODE, True, 1),
        "decode-standby-0": (Role.DECODE, False, 1),
    }
    load = loads["decode-0"]
    assert (load.incarnation, load.pid, load.has_spoken) == (decode.epoch, decode.ready.pid, True)
    assert (load.most_rows, load.num_blocks) == (decode.ready.max_num_seqs, sum(decode.ready.num_blocks))
    assert load.num_steps == sum(decode.beat.steps.durations) and load.step_us == decode.beat.steps.total_us


async def test_role_changes_are_shown_and_counted(cluster: Cluster) -> None:
    def tell(stage: Stage, text: str) -> None:
        with dialed(cluster.net) as operator:
            operator.tell(
                lambda name, epoch: RoleChange(name, epoch, "prefill-1", "decode-2", Role.DECODE, stage, text)
            )

    changes = cluster.service.role_changes
    await asyncio.to_thread(tell, Stage.BEGUN, WHY)
    await cluster.until(lambda: list(changes), "it is noted")
    [begun] = changes.report(0.0)
    assert (begun["from"], begun["to"], begun["state"], begun["reason"]) == ("prefill-1", "decode-2", "under way", WHY)
    await asyncio.to_thread(tell, Stage.DONE, "decode-2 is in the place of prefill-1 after 6.0 s")
    await cluster.until(lambda: changes.num[Role.DECODE, Stage.DONE], "so is its end")
    [done] = changes.report(0.0)
    assert (done["state"], done["reason"]) == ("done", WHY)
    told = [incident["text"] for incident in cluster.service.status.report(0.0)["incidents"]]
    assert told[:2] == ["decode-2 is in the place of prefill-1 after 6.0 s", WHY]
    metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{cluster.url}/metrics").read().decode())
    assert 'baton_role_changes_total{role="decode",stage="done"} 1.0' in metrics
    assert 'baton_role_changes_total{role="prefill",stage="done"} 0.0' in metrics
