#!/usr/bin/env bash
# Runs the Python program $1 with the tests' interpreter.
exec "${TALLY_TEST_PYTHON:-/usr/bin/python3}" "$@"
