# The Debian 12 packages that Tally is built, run and tested with. Sourced by deploy/quickstart.sh and tests/run.sh.
# shellcheck shell=bash disable=SC2034

BUILD_PACKAGES=(
    bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib gcc g++ libc6-dev
    libgrpc-dev libprotobuf-c-dev libprotobuf-dev protobuf-c-compiler protobuf-compiler
    libuv1-dev libfyaml-dev libjansson-dev libsqlite3-dev libssl-dev zlib1g-dev
)
DATA_PACKAGES=(dataset-fashion-mnist)
TEST_PACKAGES=(
    libcmocka-dev clang libclang-rt-14-dev clang-format dataset-fashion-mnist git
    python3 python3-grpcio python3-protobuf python3-numpy python3-torch python3-venv
)

# Installs those of the named packages that are missing; quick and quiet when none is.
install_packages() {
    local missing=() p
    for p in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    echo "installing ${missing[*]}" >&2
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || {
            echo "these packages are missing and only root can install them: ${missing[*]}" >&2
            return 1
        }
        as_root=(sudo)
    fi
    local out
    if ! out=$({ "${as_root[@]}" apt-get update -q &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } 2>&1); then
        printf '%s\n' "$out" | tail -20 >&2
        echo "apt-get could not install ${missing[*]}" >&2
        return 1
    fi
}
