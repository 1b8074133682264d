"""The chart's values: documented, used, and checked by their schema. No Helm is needed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from helm_chart import CASES, CHART, RENDERED, ROOT, kept, origin

from penstock.protocol.config.resolve import fields

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
JUDGE = jsonschema.Draft7Validator(SCHEMA)
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
GIVEN_WHOLE = re.compile(
    r"(resources|Resources|annotations|Annotations|labels|affinity|nodeSelector|settings|volume"
    r"|kernelCache|disruptionBudget|podSecurityContext)$"
)
"""Values that Kubernetes or Penstock defines, given on as they are."""


def paths(tree: Any, before: str = "") -> Iterator[str]:
    """All values, `models[]` for each entry of a list; not what stands within those given whole."""
    for name, value in tree.items():
        path = f"{before}{name}"
        yield path
        if isinstance(value, dict) and not GIVEN_WHOLE.search(name):
            yield from paths(value, f"{path}.")
        if name == "models":
            yield from paths(value[0], f"{path}[].")


def declared(schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """All values that the schema knows, as ``paths`` names them."""
    for name, value in schema["properties"].items():
        path = f"{before}{name}"
        yield path
        if name in ("tokenizer", "engine") and before:
            continue  # what a model changes in those sections
        inner = value.get("items", value)
        inner = SCHEMA["definitions"][inner["$ref"].split("/")[-1]] if "$ref" in inner else inner
        if "properties" in inner and not GIVEN_WHOLE.search(name):
            mark = "[]" if "items" in value else ""
            yield from declared(inner, f"{path}{mark}.")


def faults(**changed: Any) -> list[str]:
    """What the schema has against values: the place, and what is wrong there."""
    values = copy.deepcopy(VALUES)
    for path, value in changed.items():
        *folders, name = path.split("__")
        place = values
        for folder in folders:
            place = place[int(folder) if folder.isdigit() else folder]
        place[name] = value
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in JUDGE.iter_errors(values)
    ]


def test_the_schema_is_one_and_the_chart_meets_it() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert faults() == []


def test_the_schema_knows_every_value_and_the_values_show_all_that_it_knows() -> None:
    assert set(declared(SCHEMA)) - {"global"} == set(paths(VALUES))


def test_every_value_is_used() -> None:
    unused = [
        path
        for path in paths(VALUES)
        if not re.search(rf"\.{path.rpartition('.')[2].removesuffix('[]')}\b", TEMPLATES)
    ]
    assert unused == []


def test_every_value_that_is_no_name_of_kubernetes_is_explained() -> None:
    """By a comment above it or above the section that it stands in first."""
    text = (CHART / "values.yaml").read_text()
    for section in VALUES:
        at = re.search(rf"^{section}:", text, re.MULTILINE)
        assert at is not None
        before = text[: at.start()].rstrip("\n").splitlines()[-1]
        inside = text[at.start() :].split("\n\n")[0]
        assert "#" in before or "#" in inside or section in ("podSecurityContext", "nameOverride")


@pytest.mark.parametrize("case", sorted(CASES.glob("*.values.yaml")), ids=lambda path: path.name)
def test_the_values_of_the_cases_meet_the_schema(case: Any) -> None:
    given = yaml.safe_load(case.read_text())
    JUDGE.validate({**VALUES, **{name: VALUES[name] for name in SCHEMA["required"]}, **given})


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"frontends": {}}, "'frontends' was unexpected"),
        ({"engine__replcias": 2}, "engine: Additional .*'replcias' was unexpected"),
        ({"engine__device": None}, "engine.device: None is not one of"),
        ({"engine__device": "gpu"}, "engine.device: 'gpu' is not one of"),
        (
            {"engine__tensorParallelSize": 0},
            "engine.tensorParallelSize: 0 is less than the minimum of 1",
        ),
        ({"models": []}, "models: \\[\\] should be non-empty"),
        ({"models__0__name": "Big_One"}, "models.0.name: 'Big_One' does not match"),
        ({"models__0__path": "models/x"}, "models.0.path: 'models/x' does not match"),
        ({"models__0__engine": {"kind": "Job"}}, "models.0.engine.kind: 'Job' is not one of"),
        ({"models__0__settings": {"max model len": 1}}, "'max model len' does not match"),
        ({"drainTimeoutSeconds": 3601}, "drainTimeoutSeconds: 3601 is greater than the maximum"),
        ({"keys__insecure": "yes"}, "keys.insecure: 'yes' is not of type 'boolean'"),
        ({"frontend__readinessPath": "/health"}, "frontend.readinessPath: '/health' is not one of"),
        ({"frontend__grpcPort": 70000}, "frontend.grpcPort: 70000 is greater than the maximum"),
        ({"frontend__disruptionBudget": {}}, "frontend.disruptionBudget: {} should be non-empty"),
        ({"frontend__disruptionBudget": {"maxUnavailable": "1"}}, "'1' does not match"),
        ({"router__resources": {"requests": {"cpu": "two"}}}, "'two' does not match"),
        ({"router__resources": {"request": {"cpu": "2"}}}, "'request' was unexpected"),
        ({"tokenizer__autoscaling": {"targetQueueAgeSeconds": 0}}, "0 is less than or equal to"),
        ({"autoscaling__source": "statsd"}, "autoscaling.source: 'statsd' is not one of"),
        ({"image__prefix": "registry/"}, "image.prefix: 'registry/' does not match"),
    ],
)
def test_wrong_values_are_refused_by_their_place(changed: dict[str, Any], fault: str) -> None:
    (found,) = faults(**changed)
    assert re.search(fault, found)


def test_a_section_that_is_set_to_null_is_missed() -> None:
    for section in SCHEMA["required"]:
        values = {name: value for name, value in VALUES.items() if name != section}
        (error,) = JUDGE.iter_errors(values)
        assert error.message == f"'{section}' is a required property"


@pytest.mark.parametrize("case", RENDERED)
def test_what_is_kept_as_rendered_was_made_of_this_chart_and_these_values(case: str) -> None:
    with kept(case).open() as file:
        assert file.readline() == origin(case), (
            "render the cases anew: make chart fetches Helm, then "
            ".venv/bin/python tests/deploy/helm_chart.py"
        )


def own_settings() -> dict[str, str]:
    """Settings that the chart does not let anybody set beside it, and what decides each."""
    text = TEMPLATES.split('define "penstock.ownSettings" -}}')[1].split("{{-")[0]
    found: dict[str, str] = yaml.safe_load(text)
    return found


def test_the_settings_that_the_chart_keeps_to_itself_are_settings_of_penstock() -> None:
    assert own_settings().keys() <= fields().keys()


def test_the_chart_keeps_every_setting_to_itself_that_it_writes() -> None:
    written = set(re.findall(r"name: PENSTOCK_(\w+)", TEMPLATES)) - {"CONFIG"}
    assert {name.lower() for name in written} <= own_settings().keys()


def test_the_hint_for_a_setting_that_the_chart_keeps_names_a_value() -> None:
    known = {path.removesuffix("[]") for path in declared(SCHEMA)} | {"the chart's templates"}
    known |= {f"models[].engine.{name}" for name in SCHEMA["definitions"]["engine"]["properties"]}
    assert {place for place in own_settings().values() if place not in known} == set()


def test_the_chart_is_of_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()


GUIDE = (ROOT / "docs/kubernetes.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", GUIDE, re.S))
def test_the_values_of_the_guide_are_those_of_the_chart(text: str) -> None:
    changed = {
        name: {**VALUES[name], **value} if isinstance(value, dict) else value
        for name, value in yaml.safe_load(text).items()
    }
    assert faults(**changed) == []


def test_the_guide_builds_images_that_the_chart_starts() -> None:
    (targets,) = re.findall(r"for role in ([\w -]+); do", GUIDE)
    (tag,) = set(re.findall(r"\$role:(\S+)", GUIDE))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert tag == chart["appVersion"]
    built = set(re.findall(r"^FROM runtime AS (\S+)", (ROOT / "Dockerfile").read_text(), re.M))
    assert {*targets.split(), "worker-cpu"} == built
    assert f"service/chat-{chart['name']}-frontend {VALUES['frontend']['service']['port']}" in GUIDE
