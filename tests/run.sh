#!/usr/bin/env bash
# Installs what the tests need, builds, and runs every test: units and integration tests that start the real daemons, in an optimised build, under the address and
# undefined-behaviour sanitizers and under the thread sanitizer; fuzzers for a bounded time; style checks.
# Ends with `N passed, N failed` and exits 0 only if nothing failed.
# usage: tests/run.sh [--quick]     --quick: the optimised build alone, no sanitizers, no fuzzing
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=0
case "${1:-}" in
--quick) quick=1 ;;
'') ;;
*)
    echo "usage: tests/run.sh [--quick]" >&2
    exit 2
    ;;
esac

. deploy/packages.sh
install_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}" || exit 1

# Readers of our formats that Debian does not have, in a folder of their own.
python=$PWD/.venv-tests/bin/python
if ! "$python" -c 'import safetensors' 2>/dev/null; then
    echo "installing safetensors into .venv-tests" >&2
    { /usr/bin/python3 -m venv --system-site-packages .venv-tests && .venv-tests/bin/pip install --quiet --disable-pip-version-check safetensors; } || exit 1
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/tally-tests-XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

# Adds the last `N passed, N failed` of file $1 to the totals; a run that never got so far counts as one failure.
add_counts() {
    local line
    line=$(grep -oE '[0-9]+ passed, [0-9]+ failed' "$1" | tail -1)
    [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]] || {
        failed=$((failed + 1))
        return
    }
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
}

# $1: name; the rest: a command that ends with `N passed, N failed`.
part() {
    local name=$1 began=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$work/out"
    add_counts "$work/out"
    printf -- '-- %s took %d s\n' "$name" $((SECONDS - began))
}

# Every test target under the given Bazel options. Bazel prints what fails; the count comes from its event file.
bazel_tests() {
    bazel test --keep_going --noshow_progress --test_summary=none --build_event_json_file="$work/events" --test_env=TALLY_TEST_PYTHON="$python" "$@" 2>&1 |
        grep -vE '^(INFO:|Loading:|Analyzing:|WARNING: .*timeout|DEBUG:|\[)'
    /usr/bin/python3 tests/count_results.py "$work/events"
}

# The daemons and the CLI of the optimised build are what the integration tests start.
build_opt() {
    bazel build --config=opt --noshow_progress //... 2>&1 | grep -vE '^(INFO:|Loading:|Analyzing:|\[)'
    [ "${PIPESTATUS[0]}" -eq 0 ] && echo "1 passed, 0 failed" || echo "0 passed, 1 failed"
}

part "build" build_opt
part "style" tests/style.sh
part "units and integration, optimised" bazel_tests --config=opt //tests/...
if [ "$quick" -eq 0 ]; then
    part "units and integration, address and undefined-behaviour sanitizers" bazel_tests --config=asan //tests/...
    part "units, thread sanitizer" bazel_tests --config=tsan --test_tag_filters=-no_tsan --build_tests_only //tests/...
    part "fuzzing" tests/fuzz/run.sh
fi

printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
