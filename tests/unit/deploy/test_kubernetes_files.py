"""The manifests name the ports, paths, keys and times that the product has, and each other."""

import json
import re
from pathlib import Path

import pytest
import yaml

from core.config import load_config
from deploy.actors.node_choice import Need
from deploy.cli import app
from deploy.cluster import OBJECT_STORE_BYTES
from deploy.container import shared_memory_problem
from deploy.own_client import INFERENCE
from deploy.supervisor import stop_timeout_s
from tests.e2e.test_two_hosts import HEALTH_CHECKS

DEPLOY = Path(__file__).resolve().parent.parent.parent.parent / "deploy"
FILES = sorted((DEPLOY / "kuberay").glob("*.yaml"))
OBJECTS = {
    (document["kind"], document["metadata"]["name"]): document
    for path in FILES
    for document in yaml.safe_load_all(path.read_text())
}
CONFIG_MAP = OBJECTS["ConfigMap", "twophase"]
RAY = OBJECTS["RayCluster", "twophase"]["spec"]
GROUPS = {group["groupName"]: group for group in RAY["workerGroupSpecs"]}
JOB = OBJECTS["Job", "twophase-up"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "cluster.yaml"
    path.write_text(CONFIG_MAP["data"]["cluster.yaml"])
    return load_config(path)


def pods():
    """Every pod's spec, by what it is."""
    yield "head", RAY["headGroupSpec"]["template"]["spec"]
    for name, group in GROUPS.items():
        yield name, group["template"]["spec"]
    yield "job", JOB


def container_of(pod):
    (container,) = pod["containers"]
    return container


def ports_of(pod):
    return {port["name"]: port["containerPort"] for port in container_of(pod).get("ports", ())}


def test_every_volume_is_there_and_every_mounted_object_too():
    for name, pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container_of(pod)["volumeMounts"]:
            assert mount["name"] in volumes, (name, mount)
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in OBJECTS
            if "secret" in volume:
                assert f"generic {volume['secret']['secretName']} " in FILES[1].read_text()


def test_the_secrets_are_files_that_pods_are_given(config):
    security = config.security
    named = [security.api_keys, security.admin_keys, security.cluster_secret]
    mounted = {m["mountPath"]: m for m in container_of(JOB)["volumeMounts"]}
    assert set(mounted) == {"/etc/twophase/config"}  # who starts the cluster needs none of them
    for name, pod in pods():
        if name != "job":
            paths = [mount["mountPath"] for mount in container_of(pod)["volumeMounts"]]
            assert {str(Path(path).parent) for path in named} <= set(paths), name
    for path in named:
        assert f"--from-file={Path(path).name}" in FILES[1].read_text()


def test_the_front_pod_offers_the_routers_ports_and_its_health(config):
    front = GROUPS["front"]["template"]
    ports = {"grpc": config.router.port, "http": config.router.http_port}
    assert ports_of(front["spec"]) == ports
    assert container_of(front["spec"])["readinessProbe"]["grpc"] == {
        "port": config.router.port,
        "service": INFERENCE,
    }
    annotations = front["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.router.http_port)
    service = OBJECTS["Service", "twophase"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    assert all(port["targetPort"] == port["name"] for port in service["ports"])
    assert service["selector"]["ray.io/group"] == "front"
    (rule,) = OBJECTS["NetworkPolicy", "twophase-front"]["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == set(ports.values())


def test_the_router_finds_its_pod_by_the_resource_that_only_that_has(config):
    given = {name: group["rayStartParams"].get("resources") for name, group in GROUPS.items()}
    assert given["workers"] is None
    assert json.loads(json.loads(given["front"].strip("'"))) == config.router.resources


def test_pods_last_as_long_as_a_drain(config):
    for name, group in GROUPS.items():
        spec = group["template"]["spec"]
        command = container_of(spec)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["sleep", f"{config.router.drain_s:g}"], name
        assert spec["terminationGracePeriodSeconds"] == stop_timeout_s(config)


def test_worker_pods_have_room_for_a_worker_and_enough_of_them_for_all(config):
    group = GROUPS["workers"]
    cpus = float(container_of(group["template"]["spec"])["resources"]["limits"]["cpu"])
    needs = [Need.of(pool, config.engine.device) for pool in (config.prefill_pool, config.decode)]
    assert config.scaling.ask_for_nodes and RAY["enableInTreeAutoscaling"]
    most = [config.scaling.prefill.max_replicas, config.scaling.decode.max_replicas]
    wanted = sum(need.bundle["CPU"] * n for need, n in zip(needs, most, strict=True))
    assert max(need.bundle["CPU"] for need in needs) <= cpus
    assert wanted <= cpus * group["maxReplicas"]


def test_rays_object_store_fits_the_memory_that_pods_are_given():
    for name, pod in pods():
        shm = [v for v in pod["volumes"] if v["name"] == "shm"]
        if name == "job":
            continue
        assert shm[0]["emptyDir"]["medium"] == "Memory"
        limit = int(re.fullmatch(r"(\d+)Mi", shm[0]["emptyDir"]["sizeLimit"])[1]) << 20
        params = RAY["headGroupSpec"] if name == "head" else GROUPS[name]
        assert int(params["rayStartParams"]["object-store-memory"]) < limit


def test_ray_is_of_one_version_and_notices_lost_pods_soon():
    image = (DEPLOY / "docker" / "cpu.Dockerfile").read_text()
    assert f"ray[default]=={RAY['rayVersion']}" in image
    for name, pod in pods():
        if name != "job":
            env = {each["name"]: each["value"] for each in container_of(pod)["env"]}
            assert env == HEALTH_CHECKS, name


def test_the_job_runs_a_command_that_there_is_on_a_file_that_it_has():
    command, path, option, address = container_of(JOB)["args"]
    assert command in {each.callback.__name__ for each in app.registered_commands}
    assert option == "--address" and address == "ray://twophase-head-svc:10001"
    assert Path(path).name in CONFIG_MAP["data"]
    assert str(Path(path).parent) in {m["mountPath"] for m in container_of(JOB)["volumeMounts"]}


def test_prometheus_asks_the_pods_that_are_annotated():
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())["scrape_configs"]
    front = GROUPS["front"]["template"]["metadata"]["annotations"]
    assert front["prometheus.io/path"] == "/metrics"
    asked = {label for rule in job["relabel_configs"] for label in rule["source_labels"]}
    for annotation in front:
        name = re.sub(r"[^a-z]", "_", annotation)
        assert f"__meta_kubernetes_pod_annotation_{name}" in asked


@pytest.mark.case("B-156")
def test_memory_that_a_container_lacks_is_told_with_the_option_that_gives_it():
    assert shared_memory_problem(None, OBJECT_STORE_BYTES) is None
    assert shared_memory_problem(OBJECT_STORE_BYTES, OBJECT_STORE_BYTES) is None
    said = shared_memory_problem(64_000_000, OBJECT_STORE_BYTES)
    assert "/dev/shm has 61 MiB free, and Ray's object store takes 80 MiB" in said
    assert "--shm-size=256m (Docker)" in said and "medium: Memory" in said


def test_the_image_offers_what_the_check_asks_for():
    said = (DEPLOY / "docker" / "cpu.Dockerfile").read_text()
    assert "--shm-size=256m" in said
    assert f"--stop-timeout={stop_timeout_s(load_config()):g}" in said
