"""Alerts, each fired once by promtool; dashboard and rules as Prometheus parses them; who may see them."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.containers.test_compose import services
from tests.support.monitoring import ALERTS, MONITORING, alerts, asked_by_dashboard, dashboard

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)
README = (MONITORING.parent / "README.md").read_text(encoding="utf-8")

HEALTHY = {
    'up{job="baton"}': "1+0x60",
    'baton_status{status="ok"}': "1+0x60",
    'baton_status{status="degraded"}': "0+0x60",
    'baton_status{status="unavailable"}': "0+0x60",
    'baton_problems{kind="no_prefill_worker"}': "0+0x60",
    'baton_workers{role="prefill"}': "1+0x60",
    'baton_workers{role="decode"}': "2+0x60",
    'baton_requests_total{outcome="stop"}': "0+10x60",
    'baton_requests_total{outcome="failed"}': "0+0x60",
    'baton_requests_total{outcome="rejected"}': "0+0x60",
    'baton_time_to_first_token_seconds_bucket{le="0.5"}': "0+10x60",
    'baton_time_to_first_token_seconds_bucket{le="10.0"}': "0+10x60",
    'baton_time_to_first_token_seconds_bucket{le="+Inf"}': "0+10x60",
    'baton_inter_token_latency_seconds_bucket{le="0.1"}': "0+10x60",
    'baton_inter_token_latency_seconds_bucket{le="1.0"}': "0+10x60",
    'baton_inter_token_latency_seconds_bucket{le="+Inf"}': "0+10x60",
    "baton_requests_queued{}": "3+0x60",
    "baton_kv_usage_ratio{}": "0.5+0x60",
    'baton_replays_total{reason="preempted"}': "0+0x60",
    'baton_replays_total{reason="draining"}': "0+1x60",
    'baton_replays_total{reason="worker_lost"}': "0+0x60",
    'baton_worker_step_age_seconds{role="decode", worker="decode-0"}': "0.01+0x60",
    'baton_handoff_failures_total{transport="cuda_ipc"}': "0+0x60",
    'baton_handoff_seconds_bucket{transport="cuda_ipc", le="1.0"}': "0+10x60",
    'baton_handoff_seconds_bucket{transport="cuda_ipc", le="3.0"}': "0+10x60",
    'baton_handoff_seconds_bucket{transport="cuda_ipc", le="+Inf"}': "0+10x60",
    'baton_kv_path_bytes_per_second{prefill="prefill-0", decode="decode-0", transport="cuda_ipc"}': "1e10+0x60",
    'baton_memory_quarantined_blocks{server="memory-0"}': "0+0x60",
    'baton_dropped_frames_total{process="router"}': "0+0x60",
    'up{job="baton-front"}': "1+0x60",
    "baton_front_connected{}": "1+0x60",
}
"""Every 15 seconds."""


@dataclass(frozen=True)
class Case:
    """What goes wrong, by series, and what is then said of it."""

    alert: str
    series: dict[str, str]
    summary: str
    labels: dict[str, str] = field(default_factory=dict)


TRANSPORT = {"transport": "cuda_ipc"}
CASES = (
    Case("BatonDown", {'up{job="baton"}': "1+0x20 0+0x40"}, "The router on router:8000 does not answer.",
         {"job": "baton"}),
    Case("BatonUnavailable", {'baton_status{status="unavailable"}': "1+0x60", 'baton_status{status="ok"}': "0+0x60"},
         "No decode worker takes requests; they wait, and fail in the end.", {"status": "unavailable"}),
    Case("BatonDegraded", {'baton_status{status="degraded"}': "1+0x60", 'baton_status{status="ok"}': "0+0x60",
                           'baton_problems{kind="no_prefill_worker"}': "1+0x60"},
         "Completions are answered, but not as they should be: no_prefill_worker.", {"kind": "no_prefill_worker"}),
    Case("BatonRequestsFail", {'baton_requests_total{outcome="failed"}': "0+1x60"}, "9.091% of completions fail."),
    Case("BatonRequestsRejected", {'baton_requests_total{outcome="rejected"}': "0+1x60"},
         "9.091% of completions are turned away with 429 or 503."),
    Case("BatonFirstTokenSlow", {'baton_time_to_first_token_seconds_bucket{le="0.5"}': "0+0x60"},
         "One request in twenty waits 9.525s or more for its first token."),
    Case("BatonTokensSlow", {'baton_inter_token_latency_seconds_bucket{le="0.1"}': "0+0x60"},
         "One token in twenty comes 955ms or more behind the one before."),
    Case("BatonQueueLong", {"baton_requests_queued{}": "25+0x60"}, "25 completions wait in the router."),
    Case("BatonKVFull", {"baton_kv_usage_ratio{}": "0.97+0x60"}, "97% of all KV blocks are in use."),
    Case("BatonPreemptions", {'baton_replays_total{reason="preempted"}': "0+1x60"},
         "40 completions in 10 minutes began again, as decode workers ran out of KV blocks.", {"reason": "preempted"}),
    Case("BatonReplays", {'baton_replays_total{reason="worker_lost"}': "0+0x40 1+0x20"},
         "Completions began again: worker_lost.", {"reason": "worker_lost"}),
    Case("BatonWorkersFlap", {'baton_workers{role="decode"}': "2 1 2 1 2 1 2 1 2+0x50"},
         "The number of decode workers changed 8 times in 15 minutes.", {"role": "decode"}),
    Case("BatonWorkerStuck", {'baton_worker_step_age_seconds{role="decode", worker="decode-0"}': "0+0x40 5+15x20"},
         "decode-0 is busy and has finished no step for 1m 50s.", {"role": "decode", "worker": "decode-0"}),
    Case("BatonHandoffsFail", {'baton_handoff_failures_total{transport="cuda_ipc"}': "0+1x60"},
         "40 handoffs by cuda_ipc failed in 10 minutes.", TRANSPORT),
    Case("BatonHandoffsSlow", {'baton_handoff_seconds_bucket{transport="cuda_ipc", le="1.0"}': "0+0x60"},
         "One handoff in twenty by cuda_ipc takes 2.9s or more.", TRANSPORT),
    Case("BatonKVPathBroken",
         {'baton_kv_path_bytes_per_second{prefill="prefill-0", decode="decode-0", transport="cuda_ipc"}': "0+0x60"},
         "KV blocks do not get from prefill-0 to decode-0 by cuda_ipc.",
         {"prefill": "prefill-0", "decode": "decode-0"} | TRANSPORT),
    Case("BatonBlocksQuarantined", {'baton_memory_quarantined_blocks{server="memory-0"}': "12+0x60"},
         "12 KV blocks of memory-0 are those of a dead worker whose process is not over.", {"server": "memory-0"}),
    Case("BatonFramesDropped", {'baton_dropped_frames_total{process="router"}': "0+10x60"},
         "router dropped 400 frames in 10 minutes.", {"process": "router"}),
    Case("BatonFrontDown", {'up{job="baton-front"}': "1+0x20 0+0x40"},
         "The front on router:8000 does not answer.", {"job": "baton-front"}),
    Case("BatonFrontAlone", {"baton_front_connected{}": "1+0x20 0+0x40"},
         "The front on router:8000 has no session with the router; its requests wait, and fail in the end."),
)  # fmt: skip


def fired(case: Case | None) -> dict[str, Any]:
    """A test of promtool's: of all alerts that of the case fires, and no other."""
    series = HEALTHY | (case.series if case else {})
    assert series.keys() == HEALTHY.keys()
    tests = []
    for rule in alerts():
        expected = []
        if case and case.alert == rule["alert"]:
            labels = {"severity": rule["labels"]["severity"], "instance": "router:8000"} | case.labels
            said = {"summary": case.summary, "runbook": rule["annotations"]["runbook"]}
            expected = [{"exp_labels": labels, "exp_annotations": said}]
        tests.append({"eval_time": "12m", "alertname": rule["alert"], "exp_alerts": expected})
    values = [{"series": _of_router(name), "values": value} for name, value in series.items()]
    return {"interval": "15s", "input_series": values, "alert_rule_test": tests}


def _of_router(series: str) -> str:
    name, _, labels = series.removesuffix("}").partition("{")
    labels = ", ".join(filter(None, [labels, 'instance="router:8000"']))
    return f"{name}{{{labels}}}"


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {rule["alert"] for rule in alerts()}


@needs_promtool
def test_each_alert_fires_for_its_reason_alone_and_none_while_all_is_well(tmp_path: Path) -> None:
    document = {
        "rule_files": [str(ALERTS)], "evaluation_interval": "15s",
        "tests": [fired(None), *map(fired, CASES)],
    }  # fmt: skip
    _promtool("test", "rules", _written(tmp_path, document))


@needs_promtool
def test_prometheus_reads_its_files_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "prometheus.fronts.yaml"):
        _promtool("check", "config", MONITORING / name)
    expressions = sorted({expression for _, expression in asked_by_dashboard()})
    rules = [{"record": f"asked:{i}", "expr": expression} for i, expression in enumerate(expressions)]
    assert len(rules) > 30
    _promtool("check", "rules", _written(tmp_path, {"groups": [{"name": "asked", "rules": rules}]}))


def _written(directory: Path, document: dict[str, Any]) -> Path:
    path = directory / "written.yaml"
    path.write_text(json.dumps(document))
    return path


def _promtool(*words: str | Path) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_the_runbook_has_a_row_for_every_alert(rule: dict[str, Any]) -> None:
    (row,) = re.findall(rf"(?m)^\| `{rule['alert']}` \| (.*) \| (.*) \| (.*) \|$", README)
    _, metrics, action = row
    assert action == rule["annotations"]["runbook"], "the same words in both"
    assert any(name in rule["expr"] for name in re.findall(r"`(\w+)`", metrics))
    assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_have_names_and_ids_of_their_own_and_stand_side_by_side() -> None:
    panels = dashboard()["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert columns.stop <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_who_does_not_ask_for_monitoring_gets_none_and_who_does_not_say_so_opens_nothing() -> None:
    found = services("compose.yaml", BATON_GRAFANA_PASSWORD="")
    for name in ("prometheus", "grafana"):
        service = found[name]
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "one version"
        assert [port.split(":")[0] for port in service["ports"]] == ["127.0.0.1"]
        assert all(mount.endswith(":ro") for mount in service["volumes"] if mount.startswith("."))
    grafana = found["grafana"]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"] is None, "no password of ours"
    assert "networks" not in found["router"] and grafana["networks"] == ["monitoring"], "it reaches Prometheus only"
    script = grafana["entrypoint"][-1].replace("$$", "$").replace("/run.sh", "echo started").replace("infinity", "0")
    for password, said in (("", "set BATON_GRAFANA_PASSWORD\n"), ("a b", "started\n")):
        environment = {"GF_SECURITY_ADMIN_PASSWORD": password, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == said


def test_files_are_mounted_where_they_are_looked_for() -> None:
    found = services("compose.yaml")
    prometheus, grafana = found["prometheus"], found["grafana"]
    assert "./monitoring:/etc/prometheus:ro" in prometheus["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yaml" in prometheus["command"]
    assert grafana["volumes"] == ["./monitoring/grafana:/etc/grafana/provisioning:ro"]
    provisioned = yaml.safe_load((MONITORING / "grafana/dashboards/files.yaml").read_text())["providers"]
    assert [each["options"]["path"] for each in provisioned] == ["/etc/grafana/provisioning/dashboards"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (MONITORING / "grafana" / Path(home).relative_to("/etc/grafana/provisioning")).exists()
    (source,) = yaml.safe_load((MONITORING / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    asked = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == asked["global"]["scrape_interval"]
    assert asked["scrape_configs"][0]["static_configs"] == [{"targets": ["router:8000"]}]


def test_with_fronts_the_router_is_asked_as_before_and_each_front_of_itself() -> None:
    asked = {
        name: yaml.safe_load((MONITORING / name).read_text()) for name in ("prometheus.yaml", "prometheus.fronts.yaml")
    }
    [*others, fronts] = asked["prometheus.fronts.yaml"].pop("scrape_configs")
    assert others == asked["prometheus.yaml"].pop("scrape_configs")
    assert asked["prometheus.fronts.yaml"] == asked["prometheus.yaml"]
    overlay = services("compose.fronts.yaml")
    [discovery] = fronts["dns_sd_configs"]
    assert set(discovery["names"]) <= overlay.keys() and (discovery["type"], discovery["port"]) == ("A", 8000)
    jobs = {rule["expr"].split('"')[1] for rule in alerts() if rule["expr"].startswith("up{")}
    assert jobs == {fronts["job_name"], *(each["job_name"] for each in others)}
    command = overlay["prometheus"]["command"]
    assert command[0] == "--config.file=/etc/prometheus/prometheus.fronts.yaml"
    assert command[1:] == services("compose.yaml")["prometheus"]["command"][1:]
