#!/usr/bin/env bash
# Checks of the source that need no build: formatting, calls that are banned, one wrapper around gRPC, includes that point down. Ends with `N passed, N failed`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
passed=0
failed=0

# $1: what is checked; $2: the offending lines, empty if there are none.
check() {
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED %s:\n%s\n' "$1" "$2"
    fi
}

sources() { git ls-files --cached --others --exclude-standard -- '*.c' '*.h' '*.cc' '*.cu'; }

mapfile -t files < <(sources)
mapfile -t written < <(sources | grep -v '_reference\.h$') # generated tables keep their own form
check "formatting (clang-format -i)" "$(clang-format --dry-run "${written[@]}" 2>&1 | grep -E 'warning|error' | grep -oE '^[a-z_/0-9.]+:' | sort | uniq -c | head -20)"
check "banned calls" "$(grep -nHE '(^|[^a-z_])(strcpy|strcat|sprintf|vsprintf|strtok|gets|atoi|atol|atof|alloca|tmpnam|mktemp|system)\(' "${files[@]}" | grep -vE '^tests/[^:]*:[0-9]+:.*\bsystem\(' | head -20)"
check "gRPC outside its wrapper" "$(grep -lE '#include <grpc' "${files[@]}" | grep -v '^proto/')"
check "exit() outside main files" "$(grep -nHE '(^|[^a-z_])(exit|abort|_exit)\(' "${files[@]}" | grep -vE '^tests/|main\.c:|^common/(check\.h|daemon\.c):' | head -20)"

# Arrows point one way: client, server, worker, cluster -> model -> kernels -> common; proto under the first ones.
below() { # $1: a folder, $2: what it may not include
    grep -nHE "#include \"($2)/" $(sources | grep "^$1/") /dev/null
}
check "includes of common/" "$(below common 'client|server|worker|cluster|model|kernels')"
check "includes of kernels/" "$(below kernels 'client|server|worker|cluster|model|proto')"
check "includes of model/" "$(below model 'client|server|worker|cluster')"
check "includes of proto/" "$(below proto 'client|server|worker|cluster|model|kernels')"
check "includes of cluster/" "$(below cluster 'client|server|worker|model|kernels')"
check "includes of server/" "$(below server 'client|worker')"
check "includes of worker/" "$(below worker 'client|server')"
check "includes of client/" "$(below client 'server|worker')"
check "paths below somebody's home" "$(git grep -nIE '/(root|home)/[a-z]' -- . ':!tests/style.sh' | head)"

printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
