"""Counts the tests in Bazel's build event file and prints `N passed, N failed`. usage: count_results.py EVENTS

A cmocka or unittest program counts as its test functions, as its log tells; any other test program as one. A target that was not built counts as a failure.
"""
import json
import re
import sys
import urllib.parse

PASSED = re.compile(r"\[  PASSED  \] (\d+) test\(s\)|^Ran (\d+) tests? in ", re.M)
FAILED = re.compile(r"\[  FAILED  \] \S+: (\d+) test\(s\)|\[  FAILED  \] (\d+) test\(s\)|^FAILED \((?:failures|errors)=(\d+)", re.M)


def log_counts(uri):
    """(passed, failed) cases in a test's log."""
    try:
        with open(urllib.parse.unquote(uri.removeprefix("file://")), errors="replace") as log:
            text = log.read()
    except OSError:
        return 0, 0
    passed = sum(int(a or b) for a, b in PASSED.findall(text))
    failed = sum(int(next(filter(None, groups))) for groups in FAILED.findall(text))
    return passed, failed


def main():
    wanted, results, problems = set(), {}, []
    with open(sys.argv[1]) as events:
        for line in events:
            event = json.loads(line)
            ident = event["id"]
            if "targetConfigured" in ident and event.get("configured", {}).get("testSize"):
                wanted.add(ident["targetConfigured"]["label"])
            elif "testResult" in ident:
                result = event["testResult"]
                label = ident["testResult"]["label"]
                log = next((o["uri"] for o in result.get("testActionOutput", []) if o["name"] == "test.log"), "")
                results[label] = (result["status"] == "PASSED", log)
            elif "aborted" in event and "targetCompleted" in ident:
                problems.append(ident["targetCompleted"]["label"])
            elif "buildFinished" in ident and event["finished"].get("exitCode", {}).get("name") not in ("SUCCESS", "TESTS_FAILED"):
                problems.append("the build: " + event["finished"].get("exitCode", {}).get("name", "?"))
    passed = failed = 0
    for label in sorted(wanted):
        if label not in results:
            continue  # filtered by its tags, or not built: then the build has failed
        good, log = results[label]
        cases, bad = log_counts(log)
        if good:
            passed += max(cases, 1)
        else:
            passed += cases
            failed += max(bad, 1)
            print("FAILED", label)
    for problem in problems:
        print("FAILED", problem)
    failed += len(problems)
    if not results:
        print("no test ran")
        failed += 1
    print(f"{passed} passed, {failed} failed")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
