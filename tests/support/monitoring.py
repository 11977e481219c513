"""What the files of deploy/monitoring and deploy/helm ask Prometheus, by expression."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
CHART = MONITORING.parent / "helm" / "baton"
ALERTS = MONITORING / "alerts.yaml"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "baton.json"
NAME = re.compile(r"\b(?:baton|vllm)[_:]\w+")


def alerts() -> list[dict[str, Any]]:
    """The rules."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def dashboard() -> dict[str, Any]:
    """The page."""
    page: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return page


def asked_by_dashboard() -> Iterator[tuple[str, str]]:
    """(where, expression), with values for Grafana's variables."""
    page = dashboard()
    for panel in page["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], _plain(target["expr"])
    for note in page["annotations"]["list"]:
        yield note["name"], _plain(note["expr"])


def asked_by_chart() -> Iterator[tuple[str, str]]:
    """The same of deploy/helm, by which KEDA scales."""
    template = (CHART / "templates" / "scaling.yaml").read_text(encoding="utf-8").replace("{{ $in }}", 'instance=".+"')
    for query in re.findall(r"(?m)^ +query: (.*)$", template):
        yield "scaling.yaml", re.sub(r"{{.*?}}", '".+"', query)


def legends() -> Iterator[tuple[str, str, set[str]]]:
    """(panel, expression, labels that its legend shows)."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], _plain(target["expr"]), set(re.findall(r"{{(\w+)}}", target["legendFormat"]))


def _plain(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$router", ".+").replace("$worker", ".+")
