"""Alerts, the dashboard and the chart ask for what the router and a front tell: who renames something hears of it."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.base.errors import RequestError
from router.base.exposition import exposition
from router.front.counts import Counts
from tests.router.conftest import Client, Cluster
from tests.router.workers.test_memory_servers import FakeMemory
from tests.support.monitoring import NAME, alerts, asked_by_chart, asked_by_dashboard, dashboard, legends

OF_PROMETHEUS = {"instance", "job", "le", "alertname", "alertstate"}
SELECTOR = re.compile(r"\b((?:baton|vllm)[_:]\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")

Told = dict[str, dict[str, set[str]]]
"""The values of each label of each sample's name; names without samples have no labels."""


@pytest.fixture
async def told(client: Client, cluster: Cluster) -> Told:
    """By a system of a worker of each kind and a memory server, after a completion, and by a front after a refusal."""
    memory = FakeMemory(cluster, "memory-0")
    server = cluster.service.memory_servers
    await cluster.until(lambda: any(each.beat for each in server), "the memory server")
    await client.completions.create(model="tiny", prompt="the quick", max_tokens=4, extra_body={"ignore_eos": True})
    front = Counts()
    front.count_refusal(RequestError("as an example"))
    families = [*cluster.service.metrics.families(), *front.families(0, 0, has_session=True)]
    text = (await exposition(families)).decode()
    memory.kill()
    found: Told = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, {})
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def asked() -> list[tuple[str, str]]:
    return [*((rule["alert"], rule["expr"]) for rule in alerts()), *asked_by_dashboard(), *asked_by_chart()]


async def test_every_name_and_label_that_is_asked_for_is_told(told: Told) -> None:
    assert {name for _, expression in asked() for name in NAME.findall(expression)} <= told.keys()
    for where, expression in asked():
        for name, matchers in SELECTOR.findall(expression):
            for label, operator, value in MATCHER.findall(matchers):
                if label not in OF_PROMETHEUS and value != ".+":
                    values = set(value.split("|")) if operator == "=~" else {value}
                    assert values <= told[name].get(label, set()), f"{where}: {name} with {label}"
        labels = {label for name in NAME.findall(expression) for label in told[name]}
        for group in GROUPED.findall(expression):
            wanted = set(filter(None, re.split(r"[, ]+", group))) - OF_PROMETHEUS
            assert wanted <= labels or _comes_with_trouble(expression), f"{where}: {wanted - labels}"


def _comes_with_trouble(expression: str) -> bool:
    """Series that are there from the first failure on, by a code that nobody can list."""
    return "baton_request_failures_total" in expression


async def test_legends_show_labels_that_there_are(told: Told) -> None:
    for where, expression, shown in legends():
        groups = GROUPED.findall(expression)
        names = NAME.findall(expression)
        kept = set(re.split(r"[, ]+", groups[0])) if groups else {label for name in names for label in told[name]}
        assert shown <= kept, f"{where}: {shown - kept}"


async def test_what_the_dashboard_is_chosen_by_is_told(told: Told) -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            (name,) = NAME.findall(variable["definition"])
            label = variable["definition"].rstrip(")").rpartition(", ")[2]
            assert label in told[name] or label in OF_PROMETHEUS
