#!/usr/bin/env bash
# Builds every fuzzer of this folder and runs each for a bounded time on its corpus. Ends with `N passed, N failed`.
# usage: tests/fuzz/run.sh [SECONDS]      default: 10 each; a finding is left in the working directory and named
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-10}
mapfile -t targets < <(bazel query --noshow_progress 'kind(cc_binary, //tests/fuzz:all)' 2>/dev/null)
[ ${#targets[@]} -gt 0 ] || { echo "no fuzzer found"; echo "0 passed, 1 failed"; exit 1; }
if ! out=$(bazel build --config=fuzz --noshow_progress "${targets[@]}" 2>&1); then
    printf '%s\n' "$out" | tail -30
    echo "0 passed, ${#targets[@]} failed"
    exit 1
fi
passed=0
failed=0
for target in "${targets[@]}"; do
    name=${target##*:}
    corpus=$(mktemp -d)
    seeds=tests/fuzz/corpus/${name%_fuzz}
    findings=$(mktemp -d)
    if "bazel-bin/tests/fuzz/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=0 -verbosity=0 \
        -artifact_prefix="$findings/" "$corpus" $([ -d "$seeds" ] && echo "$seeds") >"$findings/log" 2>&1; then
        passed=$((passed + 1))
        rm -rf "$findings"
    else
        failed=$((failed + 1))
        tail -30 "$findings/log"
        echo "FAILED $name: its input and log are in $findings"
    fi
    rm -rf "$corpus"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
