"""The files of the gRPC API, and what is made of them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.sampling import PARAMETERS

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protocol/grpc/**/*.proto"))


@pytest.mark.parametrize("path", FILES)
def test_the_python_that_is_kept_is_what_the_file_says(path: str, tmp_path: Path) -> None:
    """`make protos` makes it anew."""
    source, out = f"penstock/{path}", tmp_path / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}", source],
        cwd=ROOT,
        check=True,
    )
    (made,) = FileDescriptorSet.FromString(out.read_bytes()).file
    kept = FileDescriptorProto()
    module = import_module(source.removesuffix(".proto").replace("/", ".") + "_pb2")
    module.DESCRIPTOR.CopyToProto(kept)
    kept.ClearField("source_code_info")
    assert _without_json_names(made) == _without_json_names(kept)
    grpc_module = import_module(module.__name__ + "_grpc") if made.service else None
    for service in made.service:
        assert hasattr(grpc_module, f"{service.name}Stub")
        text = Path(getattr(grpc_module, "__file__", "")).read_text()
        for method in service.method:
            assert f"/{made.package}.{service.name}/{method.name}'" in text


def _without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    """They follow from the names, and not every compiler writes them."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_every_sampling_parameter_has_a_field_of_its_name() -> None:
    fields = pb.Sampling.DESCRIPTOR.fields_by_name
    assert list(fields) == list(PARAMETERS)
    for field in fields.values():  # a zero that means something is told from nothing
        assert field.has_presence or field.message_type or field.is_repeated
