"""What the chart renders: programs read their options, and what would fail in silence holds."""

import argparse
import hashlib
import re
import shutil
from typing import Any

import pytest

from common.settings.config import ROUTER_SECTIONS, Config
from common.settings.options import from_flags, parse
from deploy.cli import build_parser
from deploy.operate.healthcheck import worker_here
from deploy.processes.keeper import GRACE_S, KILL_DEADLINE_S, Deadlines
from deploy.processes.launch_plan import Kind
from deploy.serve.fleet_options import joining_fleet_of
from deploy.serve.join import joining as placed
from tests.deploy.helm.rendered import CHART, NEEDED, SECRET, SPREAD, VALUES, helm, objects, render

COMPONENTS = {name: ("prefill", "decode") if "placement=spread" in VALUES[name] else ("group",) for name in VALUES}
FRONTS = {"gpus": 5580, "everything": 6001, "groups": 6001}
"""Port at which the router takes fronts, of sets with fronts."""
COUNTS = {"group": (1, 1), "prefill": (1, 0), "decode": (0, 1)}
ROUTER = {
    "app.kubernetes.io/name": "baton",
    "app.kubernetes.io/instance": "chat",
    "app.kubernetes.io/component": "router",
}
FRONT = ROUTER | {"app.kubernetes.io/component": "front"}
WORKERS = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "chat", "baton/workers": "true"}
OURS = {"podSelector": {"matchLabels": WORKERS}}
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
every_set = pytest.mark.parametrize("name", VALUES)


def of_kind(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """Objects of a kind by name, without the release's name."""
    found = [each for each in objects(name) if each["kind"] == kind]
    return {each["metadata"]["name"].removeprefix("chat-"): each for each in found}


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Templates of Pods by component."""
    return {key: each["spec"]["template"] for key, each in of_kind(name, "Deployment").items()}


def entries(name: str) -> set[str]:
    """Components in the router's place."""
    return {"front"} if name in FRONTS else set()


def monitors(name: str) -> dict[str, dict[str, Any]]:
    return of_kind(name, "ServiceMonitor")


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [found] = pod["spec"]["containers"]
    return dict(found)


def joining(pod: dict[str, Any]) -> tuple[argparse.Namespace, Config]:
    """What `baton join` reads in a Pod."""
    container = container_of(pod)
    *program, name, model = container["command"]
    assert (program, name) == (["python", "-P", "-m", "deploy.containers.container"], "join")
    args = build_parser().parse_args(["join", model, *container["args"]])
    config = from_flags(Config, args)
    joining_fleet_of(args, config)
    return args, config


@every_set
def test_each_component_has_pods_and_programs_read_what_they_get(name: str) -> None:
    found = pods(name)
    assert set(found) == {"router", *COMPONENTS[name], *entries(name)}
    router = parse(Config, ROUTER_SECTIONS, "router", "", container_of(found["router"])["args"])
    assert router.net.router_endpoint == "tcp://0.0.0.0:5570"
    for entry in {"router", *entries(name)}:
        config = parse(Config, ROUTER_SECTIONS, entry, "", container_of(found[entry])["args"])
        assert config.router.host == "0.0.0.0" and config.net.secret_file == router.net.secret_file
        assert config.router.api_key_file == ("/run/secrets/api/keys" if "apiKeys=keys" in VALUES[name] else "")
        assert config.model == router.model and config.router.drain_s == router.router.drain_s
    services = of_kind(name, "Service")
    assert set(services) == {"chat", "internal"} and services["internal"]["spec"]["publishNotReadyAddresses"]
    for component in COMPONENTS[name]:
        args, config = joining(found[component])
        expected = (2, 3) if name == "groups" else COUNTS[component]
        assert (args.prefill, args.decode) == expected
        assert config.net.router_endpoint == "tcp://chat-internal:5570"
        assert config.net.secret_file == router.net.secret_file
        assert config.worker.drain_s == router.router.drain_s


@every_set
def test_clients_reach_fronts_where_there_are_any_and_fronts_the_router(name: str) -> None:
    found, services = pods(name), of_kind(name, "Service")
    clients, internal = services["chat"], services["internal"]
    router = parse(Config, ROUTER_SECTIONS, "router", "", container_of(found["router"])["args"])
    ports = {each["name"]: each["port"] for each in internal["spec"]["ports"]}
    assert internal["spec"]["selector"] == ROUTER
    if name not in FRONTS:
        assert clients["spec"]["selector"] == ROUTER and router.router.front_endpoint == ""
        assert ports == {"http": 8000, "workers": 5570}
        return
    container = container_of(found["front"])
    assert container["command"][:5] == ["python", "-P", "-m", "deploy.containers.container", "router.front"]
    front = parse(Config, ROUTER_SECTIONS, "front", "", container["args"])
    assert clients["spec"]["selector"] == FRONT
    assert ports == {"http": 8000, "workers": 5570, "fronts": FRONTS[name]}
    assert front.router.front_endpoint == f"tcp://chat-internal:{FRONTS[name]}"
    assert router.router.front_endpoint == f"tcp://0.0.0.0:{FRONTS[name]}"
    assert {"name": "fronts", "containerPort": FRONTS[name]} in container_of(found["router"])["ports"]
    deployment = of_kind(name, "Deployment")["front"]["spec"]
    assert deployment.get("replicas") == (2 if name == "gpus" else None)
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, "nobody is refused"


@pytest.mark.parametrize("name", FRONTS)
def test_a_front_is_there_while_requests_would_wait_for_the_router_and_leaves_before_it_refuses(name: str) -> None:
    container = container_of(pods(name)["front"])
    ready = container["readinessProbe"]
    assert ready["httpGet"]["path"] == "/health", "a front with another secret is never ready"
    config = parse(Config, ROUTER_SECTIONS, "front", "", container["args"])
    assert ready["failureThreshold"] * ready["periodSeconds"] >= config.router.worker_wait_s
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/live", "a router that is replaced is no reason to end it"
    [program, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep" and float(seconds) >= ready["periodSeconds"]
    grace_s = pods(name)["front"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= float(seconds) + config.router.drain_s + GRACE_S + 10


@every_set
def test_pods_of_workers_advertise_their_own_address(name: str) -> None:
    for component in COMPONENTS[name]:
        container = container_of(pods(name)[component])
        assert container["args"].count("--net-advertise=$(POD_IP)") == 1
        assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]


@every_set
def test_workers_take_what_is_there_and_no_path_is_told(name: str) -> None:
    """Pods are hosts of their own by their addresses, so blocks travel by NIXL between them, and by CUDA IPC within."""
    for component in COMPONENTS[name]:
        args, config = joining(pods(name)[component])
        assert (getattr(args, "worker.device") == "cuda") == ("gpu.enabled=false" not in VALUES[name])
        assert config.kv.transport == "auto"


@every_set
def test_a_drain_ends_before_its_pod_is_killed(name: str) -> None:
    for component, pod in pods(name).items():
        drain_s = 3600.0 if name == "each" else 30.0
        needed_s = GRACE_S + drain_s
        if component in COMPONENTS[name]:
            drains = Deadlines(0.0, 0.0, joining(pod)[1].worker.drain_s)
            needed_s = KILL_DEADLINE_S + sum(drains.of(kind, was_ready=True) for kind in (Kind.WORKER, Kind.MEMORY))
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s + 10


@every_set
def test_a_cold_start_gives_up_before_its_probe_does(name: str) -> None:
    for component in COMPONENTS[name]:
        container = container_of(pods(name)[component])
        args, probe = joining(pods(name)[component])[0], container["startupProbe"]
        assert args.start_timeout_s == (3605 if name == "each" else 1800)
        assert probe["failureThreshold"] * probe["periodSeconds"] >= args.start_timeout_s + 30
        assert "livenessProbe" not in container, "a router that restarts is no reason to end workers"
        progress_s = of_kind(name, "Deployment")[component]["spec"]["progressDeadlineSeconds"]
        assert progress_s > args.start_timeout_s + joining(pods(name)[component])[1].worker.drain_s


@every_set
def test_probes_ask_for_the_workers_that_there_are(name: str) -> None:
    for component in COMPONENTS[name]:
        container = container_of(pods(name)[component])
        args, config = joining(pods(name)[component])
        setattr(args, "worker.device", "cpu")
        started = placed(from_flags(Config, args), joining_fleet_of(args, config), worker_here("")[1:])
        for probe in ("startupProbe", "readinessProbe"):
            *program, url = container[probe]["exec"]["command"][: -len(started)]
            asked = container[probe]["exec"]["command"][-len(started) :]
            assert (program[-1], url) == ("deploy.operate.healthcheck", "http://chat-internal:8000")
            assert [worker_here(each) for each in asked] == [each.name for each in started]


@every_set
def test_a_new_secret_makes_new_pods(name: str) -> None:
    checksums = {pod["metadata"]["annotations"]["checksum/secret"] for pod in pods(name).values()}
    [checksum] = checksums
    assert re.fullmatch("[0-9a-f]{64}", checksum)
    assert name == "hub" or checksum == hashlib.sha256(SECRET.encode()).hexdigest()
    names = {volume["secret"]["secretName"] for pod in pods(name).values()
             for volume in pod["spec"]["volumes"] if volume["name"] == "secret"}  # fmt: skip
    assert names == ({"mine"} if name == "hub" else {"chat"})


@every_set
def test_the_network_lets_in_what_is_needed_and_no_more(name: str) -> None:
    policies = of_kind(name, "NetworkPolicy")
    if name == "hub":
        assert not policies
        return
    router, workers = policies["router"]["spec"], policies["workers"]["spec"]
    assert router["podSelector"]["matchLabels"] == ROUTER and workers["podSelector"]["matchLabels"] == WORKERS
    for component, pod in pods(name).items():
        labels = pod["metadata"]["labels"].items()
        assert (WORKERS.items() <= labels) == (component in COMPONENTS[name])
        assert (ROUTER.items() <= labels) == (component == "router")
        assert (FRONT.items() <= labels) == (component == "front")
    http, wire, *fronts = router["ingress"]
    assert wire == {"ports": [{"port": 5570}], "from": [OURS]}
    theirs = {"from": [{"podSelector": {"matchLabels": FRONT}}]}
    assert fronts == ([{"ports": [{"port": FRONTS[name]}], **theirs}] if name in FRONTS else [])
    clients = [{"namespaceSelector": {"matchLabels": {"name": "entry"}}}] if name in ("everything", "groups") else []
    assert http == {"ports": [{"port": 8000}], **({"from": [*clients, OURS]} if clients else {})}
    assert workers["ingress"] == [{"from": [OURS]}], "UCX takes any port, and does not encrypt"
    usual = [{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}]
    usual += [{"ports": [{"port": 443}]}] if name == "each" else []
    usual += [{"ports": [{"port": 4318}]}] if name in ("everything", "groups") else []
    assert router["egress"] == usual
    to_router = {"ports": [{"port": 8000}, {"port": 5570}], "to": [{"podSelector": {"matchLabels": ROUTER}}]}
    assert workers["egress"] == [{"to": [OURS]}, to_router, *usual]
    assert set(policies) == {"router", "workers", *entries(name)}
    for policy in policies.values():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    if name in FRONTS:
        front = policies["front"]["spec"]
        assert front["podSelector"]["matchLabels"] == FRONT
        assert front["ingress"] == [{"ports": [{"port": 8000}], **({"from": clients} if clients else {})}]
        to_dispatcher = {"ports": [{"port": FRONTS[name]}], "to": to_router["to"]}
        assert front["egress"] == [to_dispatcher, *usual]


@every_set
def test_pods_ask_for_nothing_of_the_node_and_for_gpus_once(name: str) -> None:
    for component, pod in pods(name).items():
        spec, container = pod["spec"], container_of(pod)
        assert not {"hostPID", "hostIPC", "hostNetwork"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        assert spec["enableServiceLinks"] is False and spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        for each in (container, *spec.get("initContainers", [])):
            secured = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
            assert each["securityContext"] == secured | {"capabilities": {"drop": ["ALL"]}}
        limits = container["resources"]["limits"]
        assert "memory" in limits
        on_gpus = component in COMPONENTS[name] and "gpu.enabled=false" not in VALUES[name]
        assert limits.get("nvidia.com/gpu") == (1 if on_gpus and name != "groups" else None)
        claims = [{"name": "gpus"}] if name == "groups" and on_gpus else None
        assert container["resources"].get("claims") == claims
        assert spec.get("resourceClaims") == (
            [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}] if claims else None
        )


@every_set
def test_mounts_have_volumes_and_selectors_their_pods(name: str) -> None:
    for deployment in of_kind(name, "Deployment").values():
        pod = deployment["spec"]["template"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for each in (container_of(pod), *pod["spec"].get("initContainers", [])):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
    budgets = of_kind(name, "PodDisruptionBudget")
    assert set(budgets) == (set() if name == "hub" else {*COMPONENTS[name], *entries(name)})
    for component, budget in budgets.items():
        labels = pods(name)[component]["metadata"]["labels"].items()
        assert budget["spec"]["maxUnavailable"] == 1 and budget["spec"]["selector"]["matchLabels"].items() <= labels


@pytest.mark.parametrize("name", ["everything", "groups"])
def test_scaling_can_scale_and_does_not_fight_the_chart(name: str) -> None:
    scaled = of_kind(name, "ScaledObject")
    front = scaled.pop("front")["spec"]
    assert front["scaleTargetRef"] == {"name": "chat-front"} and front["minReplicaCount"] == 2
    [trigger] = front["triggers"]
    assert (trigger["type"], trigger["metricType"], trigger["metadata"]) == ("cpu", "Utilization", {"value": "75"})
    assert container_of(pods(name)["front"])["resources"]["requests"]["cpu"], "or there is nothing to have 75 % of"
    assert "replicas" not in of_kind(name, "Deployment")["front"]["spec"]
    assert set(scaled) == set(COMPONENTS[name])
    for component, each in scaled.items():
        spec = each["spec"]
        assert spec["scaleTargetRef"] == {"name": f"chat-{component}"}
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        assert "replicas" not in of_kind(name, "Deployment")[component]["spec"]
        thresholds = [float(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]]
        expected = {"prefill": [0.75], "decode": [0.75, 0.75], "group": [1.5, 2.25, 1.5]}[component]
        assert thresholds == expected, "of two and three workers and two pools in a Pod of groups"
    instance = [each["replacement"] for each in monitors(name)["chat"]["spec"]["endpoints"][0]["relabelings"]]
    queries = [trigger["metadata"]["query"] for each in scaled.values() for trigger in each["spec"]["triggers"]]
    assert instance == ["baton", "chat"] and all('instance="chat"' in query for query in queries)


@pytest.mark.parametrize("name", ["everything", "groups"])
def test_the_router_is_asked_once_and_each_front_by_itself(name: str) -> None:
    asked = {}
    for monitor in monitors(name).values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [service] = [each for each in of_kind(name, "Service").values() if wanted <= each["metadata"]["labels"].items()]
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        asked[labels["job"]] = (service["spec"]["selector"], "instance" in labels)
    assert asked == {"baton": (ROUTER, True), "baton-front": (FRONT, False)}


@pytest.mark.parametrize("name", ["everything", "groups"])
def test_entries_pass_on_the_api_alone(name: str) -> None:
    [ingress], [route] = of_kind(name, "Ingress").values(), of_kind(name, "HTTPRoute").values()
    [rule] = ingress["spec"]["rules"]
    backend = {"service": {"name": "chat", "port": {"name": "http"}}}
    assert rule["http"]["paths"] == [{"path": "/v1/", "pathType": "Prefix", "backend": backend}]
    assert route["spec"]["rules"] == [
        {
            "matches": [{"path": {"type": "PathPrefix", "value": "/v1/"}}],
            "backendRefs": [{"name": "chat", "port": 8000}],
        }
    ]


def test_a_picker_chooses_among_routers_whose_labels_the_pool_has() -> None:
    for name, own in (("picked", {"pool": "chat"}), ("each", {"app.kubernetes.io/instance": "chat"})):
        [pool] = of_kind(name, "InferencePool").values()
        wanted = pool["spec"]["selector"]["matchLabels"]
        assert own.items() <= wanted.items()
        chosen = [key for key, pod in pods(name).items() if wanted.items() <= pod["metadata"]["labels"].items()]
        assert (pool["apiVersion"], chosen) == ("inference.networking.k8s.io/v1", ["router"])
        [port] = pool["spec"]["targetPorts"]
        assert {"name": "http", "containerPort": port["number"]} in container_of(pods(name)["router"])["ports"]
        picker = {"name": "picker", "port": {"number": 9002}}
        assert pool["spec"]["endpointPickerRef"] == picker | {
            "failureMode": "FailOpen" if name == "picked" else "FailClose"
        }
    for name, target in (("picked", "chat"), ("hub", "theirs")):
        [route] = of_kind(name, "HTTPRoute").values()
        [rule] = route["spec"]["rules"]
        group = "inference.networking.k8s.io"
        assert rule["backendRefs"] == [{"group": group, "kind": "InferencePool", "name": target}]
    assert not of_kind("hub", "InferencePool") and not of_kind("node", "InferencePool")


@needs_helm
@every_set
def test_helm_renders_the_same_and_has_nothing_to_say(name: str) -> None:
    assert render(VALUES[name]) == objects(name)


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "model: either claim, or id"),
        (("model.claim=models",), "secret: value or existing"),
        ((*NEEDED, "autoscaling.enabled=true"), "autoscaling.prometheus: its address"),
        ((*SPREAD, "httpRoute.enabled=true"), "httpRoute.parents: the Gateways"),
        ((*NEEDED, "inferencePool.enabled=true"), "inferencePool.picker.service: the Service"),
        ((*NEEDED, "inferencePool.enabled=true", "fronts.replicas=2"), "inferencePool: a picker asks routers"),
        ((*NEEDED, "fronts.dispatcherPort=5570"), "at '/fronts/dispatcherPort'"),
        ((*NEEDED, "decode.replica=2"), "at '/decode': additional properties 'replica' not allowed"),
        ((*NEEDED, "secret.value=hunter2"), "at '/secret/value': minLength: got 7, want 32"),
    ],
)
def test_helm_refuses_mistakes(values: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        helm("template", "chat", str(CHART), values=values)
