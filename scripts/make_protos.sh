#!/usr/bin/env bash
# Regenerates ddiloco_jax/wire/pb from protos/.
#
# The generator is pinned to the oldest one whose code runs on every protobuf
# that pyproject.toml admits: generated code never runs on a runtime that is
# older than its generator.
#
#   bash scripts/make_protos.sh
set -euo pipefail
cd "$(dirname "$0")/.."

readonly generator="grpcio-tools==1.76.0"  # Writes code for protobuf 6.31.1.
readonly out=ddiloco_jax/wire/pb
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

if command -v uv > /dev/null; then
  uv venv --quiet "$work/venv"
  uv pip install --quiet --python "$work/venv/bin/python" \
    "$generator" "setuptools<81"
else
  "${PYTHON:-python3}" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet "$generator" "setuptools<81"
fi
"$work/venv/bin/python" -m grpc_tools.protoc --proto_path=protos \
  --python_out="$work" --pyi_out="$work" ddiloco/v1/synchronizer.proto
cp "$work"/ddiloco/v1/synchronizer_pb2.py{,i} "$out/"
echo "Wrote $out/synchronizer_pb2.py and $out/synchronizer_pb2.pyi."
