"""Helm itself lints and renders the chart, and what it renders meets the schemas of Kubernetes.

`make chart` fetches Helm 3, Helm 4 and the schemas.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from custom_resources import SPECS
from helm_chart import (
    CASES,
    CHART,
    HELMS,
    RENDERED,
    TOOLS,
    HelmFailed,
    Manifest,
    kept_manifests,
    manifests,
    named,
    of_kind,
    render,
    run_helm,
    templates,
    values_of,
)

pytestmark = [
    pytest.mark.slow,  # make chart runs them; what is kept as rendered starts in the quick run
    pytest.mark.skipif(not HELMS, reason="there is no Helm: make chart fetches it"),
]
EACH_HELM = pytest.mark.parametrize("helm", HELMS, ids=lambda path: path.name)
EACH_CASE = pytest.mark.parametrize(
    "case", sorted(path.name.partition(".")[0] for path in CASES.glob("*.values.yaml"))
)
OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes: the first that Chart.yaml allows, and the last with known schemas."""


def complaints(found: list[Manifest]) -> list[str]:
    done = subprocess.run(
        [TOOLS / "bin/python", Path(__file__).with_name("validate_manifests.py"), OLDEST, NEWEST],
        input=json.dumps(found),
        capture_output=True,
        text=True,
        check=True,
    )
    told: list[str] = json.loads(done.stdout)
    return told


def as_pods(manifest: Manifest) -> list[Manifest]:
    """The pods of a kind that Kubernetes' schemas do not know."""
    name = manifest["metadata"]["name"]
    return [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": f"{name}-{role}"}}
        for role, template in templates(manifest)
    ]


@EACH_HELM
@EACH_CASE
def test_helm_finds_nothing_wrong_with_the_chart(helm: Path, case: str) -> None:
    said = run_helm(helm, "lint", "--strict", str(CHART), "--values", str(values_of(case)))
    assert "1 chart(s) linted, 0 chart(s) failed" in said
    assert re.findall(r"\[(?:WARNING|ERROR)\].*", said) == []


@EACH_HELM
@pytest.mark.parametrize("case", RENDERED)
def test_what_is_kept_as_rendered_is_what_helm_renders(helm: Path, case: str) -> None:
    def by_name(found: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(one["kind"], one["metadata"]["name"]): one for one in found}

    text = render(helm, values_of(case))
    assert by_name(manifests(text)) == by_name(kept_manifests(case)), (
        "the chart has changed: .venv/bin/python tests/deploy/helm_chart.py renders the cases anew"
    )


@EACH_HELM
def test_both_helms_render_the_same(helm: Path) -> None:
    for path in CASES.glob("*.values.yaml"):
        both = [manifests(render(one, path)) for one in (helm, HELMS[0])]
        keyed = [sorted(json.dumps(one, sort_keys=True) for one in found) for found in both]
        assert keyed[0] == keyed[1]


@EACH_CASE
def test_everything_meets_the_schema_of_its_kind(case: str) -> None:
    found = manifests(render(HELMS[-1], values_of(case)))
    own = [one for one in found if (one["apiVersion"], one["kind"]) in SPECS]
    for manifest in own:
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
        spec = SPECS[manifest["apiVersion"], manifest["kind"]]
        jsonschema.Draft7Validator(spec).validate(manifest["spec"])
    pods = [pod for manifest in own for pod in as_pods(manifest)]
    assert complaints([one for one in found if one not in own] + pods) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("commands", ["penstock"], "'commands' was unexpected"),
        ("tty", "yes", "'yes' is not of type 'boolean'"),
    ],
)
def test_the_schemas_find_what_is_wrong(field: str, value: Any, said: str) -> None:
    router = named(kept_manifests("plain"), "Deployment", "demo-penstock-router")
    router["spec"]["template"]["spec"]["containers"][0][field] = value
    told = complaints([router])
    assert [line.partition(":")[0] for line in told] == [OLDEST, NEWEST]
    assert all(said in line for line in told)


def test_without_values_secrets_are_made_that_penstock_takes() -> None:
    both = [manifests(render(HELMS[-1])) for _ in range(2)]
    texts = set()
    for found in both:
        for secret in of_kind(found, "Secret"):
            (value,) = secret["data"].values()
            texts.add(base64.b64decode(value).decode())
    assert len(texts) == 4, "random ones"
    assert all(re.fullmatch(r"[A-Za-z0-9]{48}", text) for text in texts)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["engine.replcias=2"], "replcias.* not allowed"),
        (["engine.device=gpu"], "must be one of"),
        (["models=null"], "missing property 'models'"),
        (["settings.router=tcp://x:1"], "settings.router: the chart sets it .* fullname"),
        (["settings.max-model-len=5"], ""),
        (["settings.drain-timeout-s=5"], "settings.drain-timeout-s: .* see drainTimeoutSeconds"),
        (["models[0].name=a", "models[0].settings.rank=1"], "settings.rank: the chart sets it"),
        (["models[0].name=a", "models[1].name=a"], "the name a is given twice"),
        (["models[0].name=a", "models[0].volume.emptyDir.medium=Memory"], "a has a volume; set"),
        (["models[0].name=a", "models[0].mountPath=/models"], "a has a mountPath, but no volume"),
        (
            ["models[0].name=a", "models[0].path=/m/a", "models[0].mountPath=/mm",
             "models[0].volume.hostPath.path=/srv"],
            "a has the path /m/a, which is not below its mountPath /mm",
        ),
        (
            ["engine.kind=LeaderWorkerSet", "engine.device=cuda", "engine.tensorParallelSize=2",
             "models[0].name=a"],
            "models: a is divided among GPUs .* settings.rank_traffic is encrypted; .* to plain",
        ),
        (
            ["engine.kind=LeaderWorkerSet", "engine.device=cuda", "engine.tensorParallelSize=2",
             "models[0].name=a", "models[0].settings.rank_traffic=plain"],
            "",
        ),
        (["keys.insecure=true", "keys.existingSecret=x"], "keys.insecure: true switches keys off"),
        (["keys.keysFile=keys.jsonl"], "which Secret holds that file\\? Name it in keys.existing"),
        (["keys.apiKeys="], "under which key shall the Secret hold the API key"),
        (["keys.apiKeys=", "keys.existingSecret=x"], "which key of it holds the API keys\\?"),
        (["autoscaling.enabled=true", "keys.existingSecret=x"], "Secret that holds the one for"),
        (
            ["autoscaling.enabled=true", "metricsKey.existingSecret=x"],
            "which key of metricsKey.existingSecret holds",
        ),
        (["autoscaling.enabled=true", "autoscaling.source=prometheus"], "where is the Prometheus"),
        (
            ["autoscaling.enabled=true", "tokenizer.autoscaling.minReplicas=9"],
            "tokenizer.autoscaling: minReplicas 9 is more than maxReplicas 8",
        ),
        ([f"fullnameOverride={'a' * 39}"], "has 63 characters, and 52 are possible: choose a shor"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_with_the_remedy(sets: list[str], said: str) -> None:
    if not said:
        render(HELMS[-1], None, *sets)
        return
    with pytest.raises(HelmFailed, match=said):
        render(HELMS[-1], None, *sets)


def test_what_a_model_sets_wins_over_what_all_have_also_where_it_is_nothing(
    tmp_path: Path,
) -> None:
    values: dict[str, Any] = {
        "autoscaling": {"enabled": False},
        "settings": {"max_wait_s": 20, "log_level": "debug"},
        "engine": {"replicas": 2, "device": "cuda", "tolerations": [{"key": "gpu"}]},
        "models": [
            {"name": "a", "engine": {"replicas": 0, "device": "cpu", "tolerations": []}},
            {"name": "b", "settings": {"max_wait_s": 5}, "tokenizer": {"replicas": 3}},
        ],
    }
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    found = manifests(render(HELMS[-1], path))
    a, b = (named(found, "StatefulSet", f"demo-penstock-{name}-engine")["spec"] for name in "ab")
    assert (a["replicas"], b["replicas"]) == (0, 2)
    pods = [one["template"]["spec"] for one in (a, b)]
    assert ["tolerations" in pod for pod in pods] == [False, True]
    workers = [pod["initContainers"][0] for pod in pods]
    assert [one["image"] for one in workers] == [
        "penstock/worker-cpu:0.1.0",
        "penstock/worker-cuda:0.1.0",
    ]
    assert "limits" not in workers[0]["resources"]
    assert workers[1]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    (settings,) = of_kind(found, "ConfigMap")
    assert settings["data"] == {
        "penstock.yaml": "log_level: debug\nmax_wait_s: 20\n",
        "a.model.yaml": "log_level: debug\nmax_wait_s: 20\n",
        "b.model.yaml": "log_level: debug\nmax_wait_s: 5\n",
    }
    assert named(found, "Deployment", "demo-penstock-b-tokenizer")["spec"]["replicas"] == 3


def test_a_changed_setting_starts_only_the_pods_that_read_it() -> None:
    def marks(*sets: str) -> dict[str, str]:
        found = manifests(render(HELMS[-1], values_of("everything"), *sets))
        return {
            f"{one['kind']} {one['metadata']['name']}": template["metadata"]["annotations"][
                "penstock/settings"
            ]
            for one in found
            for _, template in templates(one)
        }

    def changed(*sets: str) -> set[str]:
        after = marks(*sets)
        return {name for name in before if before[name] != after[name]}

    before = marks()
    assert changed("settings.max_wait_s=21") == before.keys()
    own = {"Deployment llm-large-tokenizer", "StatefulSet llm-large-engine"}
    assert changed("models[0].settings.max_model_len=16k") == own


@EACH_HELM
def test_the_chart_can_be_packed(helm: Path, tmp_path: Path) -> None:
    run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    (packed,) = tmp_path.iterdir()
    assert packed.name == "penstock-0.1.0.tgz"
    assert "kind: Deployment" in run_helm(helm, "template", "x", str(packed))


@EACH_HELM
def test_an_older_kubernetes_is_refused(helm: Path) -> None:
    with pytest.raises(HelmFailed, match=r"kubeVersion: >=1\.29"):
        run_helm(helm, "template", "x", str(CHART), "--kube-version", "1.28.0")


def test_the_notes_say_how_to_get_the_key() -> None:
    text = run_helm(HELMS[-1], "install", "demo", str(CHART), "--dry-run=client")
    notes = text.partition("NOTES:")[2]
    assert "get secret demo-penstock-keys" in notes
    assert "port-forward service/demo-penstock-frontend 8000" in notes


@pytest.mark.parametrize("word", ["null", "true", "1e3", "007"])
def test_a_name_that_yaml_would_read_as_something_else_stays_a_name(
    word: str, tmp_path: Path
) -> None:
    values = {
        "fullnameOverride": word,
        "models": [{"name": word, "path": f"/{word}", "volume": {"emptyDir": {}}}],
        "secret": {"existingSecret": word, "key": word},
        "keys": {"existingSecret": word, "apiKeys": word},
        "metricsKey": {"existingSecret": word, "key": word},
        "frontend": {"tlsSecret": word, "priorityClassName": word},
        "engine": {"runtimeClassName": word},
        "autoscaling": {"enabled": True},
        "monitoring": {"enabled": True},
    }
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    found = manifests(render(HELMS[-1], path))
    own = [one for one in found if (one["apiVersion"], one["kind"]) in SPECS]
    for manifest in own:
        spec = SPECS[manifest["apiVersion"], manifest["kind"]]
        jsonschema.Draft7Validator(spec).validate(manifest["spec"])
    assert complaints([one for one in found if one not in own]) == []
