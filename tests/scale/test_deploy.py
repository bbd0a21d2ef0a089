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


def test_ray_s_example_has_arguments_that_exist() -> None:
    from dataclasses import fields

    from topw_deploy.serve.service import ServeOptions

    application = yaml.safe_load((ROOT / "examples" / "scale" / "ray.yaml").read_text("utf-8"))["applications"][0]
    arguments = application["args"]
    assert arguments.keys() - {"prefix_characters", "load_factor"} <= {each.name for each in fields(ServeOptions)}
    replica = next(each for each in application["deployments"] if each["name"] == "Replica")
    assert replica["graceful_shutdown_timeout_s"] == arguments["drain_timeout"]
    assert replica["autoscaling_config"]["target_ongoing_requests"] == arguments["engine"]["max_batch"]
