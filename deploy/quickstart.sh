#!/usr/bin/env bash
# Installs what is missing, builds Tally (optimised), and trains the CNN of examples/fashion_cnn.yaml on Fashion-MNIST with two workers and two
# parameter-server shards on this machine. Ends with the accuracy on the test set and the place of the weights.
# usage: deploy/quickstart.sh [options of `tally run`, such as --set train.epochs=2]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. deploy/packages.sh
install_packages "${BUILD_PACKAGES[@]}" "${DATA_PACKAGES[@]}"

echo "building" >&2
if ! out=$(bazel build --config=opt --noshow_progress //client:tally //server:tally-server //worker:tally-worker 2>&1); then
    printf '%s\n' "$out" | tail -40 >&2
    echo "the build failed" >&2
    exit 1
fi

exec bazel-bin/client/tally run examples/fashion_cnn.yaml --data 2 --shards 2 "$@"
