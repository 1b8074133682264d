"""Judges manifests by the schemas of Kubernetes; runs where kubernetes-validate is installed.

``validate_manifests.py VERSION… < MANIFESTS`` reads a JSON list and writes one of complaints.
"""

from __future__ import annotations

import json
import sys

import kubernetes_validate


def main(versions: list[str]) -> None:
    found = []
    for manifest in json.load(sys.stdin):
        for version in versions:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                place = ".".join(map(str, error.path))
                name = f"{manifest['kind']} {manifest['metadata']['name']}"
                found.append(f"{version}: {name}: {place}: {error.message}")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
