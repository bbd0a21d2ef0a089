"""The container file and the manifests name what exists: options, probes, metrics, seconds."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from topw_deploy.cli.serve import serve
from topw_deploy.serve.app import ROUTES
from topw_deploy.serve.metrics import GAUGES
from topw_deploy.serve.server import _CLOSING
from topw_deploy.serve.service import _CANCELLED_SECONDS
from topw_deploy.text import parse_size

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text("utf-8")
MANIFEST = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
DOCUMENTS = list(yaml.safe_load_all(MANIFEST))
PATHS = {route.path for route in ROUTES}


def document(kind: str) -> Any:
    return next(each for each in DOCUMENTS if each["kind"] == kind)


POD = document("Deployment")["spec"]["template"]["spec"]
SERVER = POD["containers"][0]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What `topw serve` reads from its arguments. Raises UsageError for an unknown option."""
    found = serve.make_context("serve", list(arguments), resilient_parsing=False).params
    return dict(found)


def test_the_image_runs_a_command_that_exists() -> None:
    entry, words = (re.search(rf"^{name} (\[.*\])$", CONTAINER, re.MULTILINE) for name in ("ENTRYPOINT", "CMD"))
    assert entry is not None
    assert words is not None
    assert yaml.safe_load(entry[1]) == ["topw", "serve"]
    found = parsed(yaml.safe_load(words[1]))
    assert f"EXPOSE {found['port']}" in CONTAINER
    assert f"http://127.0.0.1:{found['port']}/health" in CONTAINER
    assert re.search(r"^USER 10001:10001$", CONTAINER, re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINER, re.MULTILINE)
    ignored = (ROOT / "deploy" / "Containerfile.dockerignore").read_text("utf-8").split()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


def test_the_image_s_packages_are_pinned() -> None:
    assert "-c constraints.txt" in CONTAINER
    assert re.search(r"python:\d+\.\d+\.\d+-", CONTAINER)
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    assert {"onnxruntime", "onnxruntime-gpu", "starlette", "uvicorn", "tokenizers", "ray"} <= pinned


@pytest.mark.parametrize("kind", [each["kind"] for each in DOCUMENTS])
@pytest.mark.slow
def test_the_manifest_fits_the_schemas_of_kubernetes(kind: str) -> None:
    """Of the version that docs/guide/scale.md names; strict ones, which refuse unknown fields."""
    kubernetes_validate.validate(document(kind), "1.37", strict=True)
    wrong = copy.deepcopy(document(kind))
    wrong["metadata"]["nmae"] = "topw"
    with pytest.raises(kubernetes_validate.ValidationError, match="nmae"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "deploy").glob("*.sh")))
def test_the_scripts_have_no_syntax_errors(script: str) -> None:
    done = subprocess.run(["bash", "-n", script], cwd=ROOT / "deploy", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_pod_s_options_and_variables_exist() -> None:
    found = parsed(SERVER["args"])
    assert found["port"] == SERVER["ports"][0]["containerPort"]
    names = {f"TOPW_SERVE_{str(option.name).upper()}" for option in serve.params}
    assert {each["name"] for each in SERVER["env"]} <= names


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_for_paths_that_exist_and_need_no_key(probe: str) -> None:
    from topw_deploy.serve.app import OPEN_PATHS

    path = SERVER[probe]["httpGet"]["path"]
    assert path in PATHS & OPEN_PATHS
    assert path == ("/live" if probe == "livenessProbe" else "/health")


def test_a_pod_has_the_time_to_drain() -> None:
    before = float(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = parsed(SERVER["args"])["drain_timeout"]
    assert POD["terminationGracePeriodSeconds"] > before + drain + _CANCELLED_SECONDS + _CLOSING
    readiness = SERVER["readinessProbe"]
    liveness = SERVER["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > readiness["periodSeconds"]


def test_the_pod_runs_without_privileges() -> None:
    assert POD["securityContext"]["runAsNonRoot"]
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]
    assert SERVER["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_replicas_are_added_by_a_metric_that_exists() -> None:
    scaler = document("HorizontalPodAutoscaler")["spec"]
    metric = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert metric in {f"topw_{name}" for name, _, _ in GAUGES}
    assert scaler["scaleTargetRef"]["name"] == document("Deployment")["metadata"]["name"]


def test_objects_select_the_pods() -> None:
    labels = document("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert document("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert document("Service")["spec"]["selector"] == labels
    assert document("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert document("Service")["spec"]["ports"][0]["targetPort"] == SERVER["ports"][0]["name"]
    volumes = {each["name"] for each in POD["volumes"]}
    assert {each["name"] for each in SERVER["volumeMounts"]} == volumes


def test_the_pod_has_room_for_its_memory() -> None:
    resources = SERVER["resources"]
    request, limit = (parse_size(f"{resources[name]['memory']}B", "memory") for name in ("requests", "limits"))
    measured = re.search(r"takes (\d+) MiB with eight streams \(deploy/measure.sh\)", MANIFEST)
    assert measured is not None
    assert int(measured[1]) * 2**20 <= request <= limit


def test_the_pod_has_the_cores_that_the_model_can_use() -> None:
    """`--threads` for the model, and what Python takes beside it."""
    measured = re.search(r"and at most ([\d.]+)\n# cores", MANIFEST)
    assert measured is not None
    cpu = SERVER["resources"]["requests"]["cpu"]
    assert cpu == f"{float(measured[1]) * 1000:.0f}m"
    assert float(measured[1]) > parsed(SERVER["args"])["threads"]
    assert float(SERVER["resources"]["limits"]["cpu"]) >= float(measured[1])


def test_the_manifest_s_limits_for_gpus_fit_the_schemas() -> None:
    """They are a comment."""
    found = re.search(r"^ +# limits: (\{.*\})$", MANIFEST, re.MULTILINE)
    assert found is not None
    limits = yaml.safe_load(found[1])
    assert limits["nvidia.com/gpu"] == 1
    deployment = copy.deepcopy(document("Deployment"))
    deployment["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": limits}
    kubernetes_validate.validate(deployment, "1.37", strict=True)


def test_ray_s_example_has_arguments_that_exist() -> None:
    from dataclasses import fields

    from topw_deploy.serve.service import ServeOptions

    application = yaml.safe_load((ROOT / "examples" / "scale" / "ray.yaml").read_text("utf-8"))["applications"][0]
    arguments = application["args"]
    assert arguments.keys() - {"prefix_characters", "load_factor"} <= {each.name for each in fields(ServeOptions)}
    replica = next(each for each in application["deployments"] if each["name"] == "Replica")
    assert replica["graceful_shutdown_timeout_s"] == arguments["drain_timeout"]
    assert replica["autoscaling_config"]["target_ongoing_requests"] == arguments["engine"]["max_batch"]
