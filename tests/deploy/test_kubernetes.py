"""The Kubernetes manifests: schemas, and what kustomize would find missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy.workers.sources import check_url

pytestmark = pytest.mark.slow

yaml = pytest.importorskip("yaml")

KUBERNETES = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = ("overlays/p5en-efa", "overlays/cpu-small")
CUSTOM = {"ServiceMonitor", "PrometheusRule"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def base_objects() -> list[dict[str, Any]]:
    listed = documents(BASE / "kustomization.yaml")[0]["resources"]
    return [document for name in listed for document in documents(BASE / name)]


def of(kind: str) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in base_objects() if o["kind"] == kind}


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_every_object_fits_its_schema(version: str) -> None:
    """Strictly: a misspelt field is an error, as the API server would warn."""
    validate = pytest.importorskip("kubernetes_validate")
    for thing in base_objects():
        if thing["kind"] not in CUSTOM:
            validate.validate(thing, version, strict=True)


def test_every_file_is_listed_and_every_patch_has_a_target() -> None:
    """No manifest is forgotten, and each overlay patches objects that the base has."""
    listed = set(documents(BASE / "kustomization.yaml")[0]["resources"])
    assert listed == {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    for overlay in OVERLAYS:
        made = documents(KUBERNETES / overlay / "kustomization.yaml")[0]
        for patch in made["patches"]:
            assert (KUBERNETES / overlay / patch["path"]).is_file()
            assert patch["target"]["name"] in of(patch["target"]["kind"])


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_kustomize_builds(folder: str) -> None:
    """`kubectl kustomize`, where there is one, and every result fits its schema."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here; the check above covers names and targets")
    validate = pytest.importorskip("kubernetes_validate")
    built = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    for thing in yaml.safe_load_all(built.stdout):
        if thing["kind"] not in CUSTOM:
            validate.validate(thing, "1.34", strict=True)


def test_the_proxies_find_the_workers() -> None:
    """The names in the proxy's settings are headless services: one address for each ready pod."""
    generated = documents(BASE / "kustomization.yaml")[0]["configMapGenerator"][0]["literals"]
    urls = dict(item.split("=", 1) for item in generated)
    for role, key in (("prefill", "KVLOOP_PREFILL_URLS"), ("decode", "KVLOOP_DECODE_URLS")):
        port = of("Service")[role]["spec"]["ports"][0]["port"]
        assert check_url(urls[key]) == f"dns+http://{role}:{port}"
        assert of("Service")[role]["spec"]["clusterIP"] == "None"


def test_selectors_match_their_pods() -> None:
    """Services, disruption budgets and policies select labels that some pod carries."""
    pods = [
        thing["spec"]["template"]["metadata"]["labels"]
        for kind in ("StatefulSet", "Deployment")
        for thing in of(kind).values()
    ]
    wanted = [service["spec"]["selector"] for service in of("Service").values()]
    wanted += [b["spec"]["selector"]["matchLabels"] for b in of("PodDisruptionBudget").values()]
    wanted += [p["spec"]["podSelector"]["matchLabels"] for p in of("NetworkPolicy").values()]
    for labels in wanted:
        assert any(labels.items() <= pod.items() for pod in pods), labels


def test_stopping_leaves_time_to_drain() -> None:
    """A worker's grace exceeds its drain and the launcher's 30 s; a proxy's its own 30 s."""
    for role in ("prefill", "decode"):
        pod = of("StatefulSet")[role]["spec"]["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        longest = int(next(w for w in command if w.startswith("--longest=")).split("=")[1])
        assert pod["terminationGracePeriodSeconds"] >= longest + 30
    assert (
        of("Deployment")["proxy"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 40
    )
