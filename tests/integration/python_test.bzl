"""A test that is a Python program: run by the system's Python, which has the packages that tests/run.sh installs."""

def python_test(name, data = [], size = "medium", tags = []):
    native.sh_test(
        name = name,
        size = size,
        srcs = ["python_test.sh"],
        args = ["$(location %s.py)" % name],
        data = data + [name + ".py"],
        # tsan: the daemons' threads are covered by the units; whole runs of libraries that are not instrumented take too long.
        tags = tags + ["no_tsan"],
    )
