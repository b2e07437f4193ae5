#!/usr/bin/env bash
# Gradescope: builds the autograder's image. The archive that you upload holds this file and
# run_autograder at its top, and the course's repository in a folder called course.
# PYTHON: the interpreter (3.10 or later). PIP_FLAGS: more for pip, such as an index of CPU builds.
set -euo pipefail
SOURCE="${AUTOGRADER_SOURCE:-/autograder/source}"
PYTHON="${PYTHON:-python3}"

if ! command -v "$PYTHON" > /dev/null; then
    apt-get update && apt-get install -y python3 python3-pip python3-venv
fi
"$PYTHON" -m venv "$SOURCE/venv"
# The exact torch first, in the same command: alone, the package's range would choose a GPU build.
cd "$SOURCE/course"
TORCH="$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints/cpu.txt)"
# shellcheck disable=SC2086
"$SOURCE/venv/bin/python" -m pip install -q ${PIP_FLAGS:-} -c constraints/cpu.txt "$TORCH" pytest -e .
